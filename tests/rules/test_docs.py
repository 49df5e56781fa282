"""Documents lead somewhere: every link and picture is there, and the architecture page names every part."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.rules.source import PACKAGE, ROOT, shown

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|<img[^>]*\ssrc=\"([^\"]+)\"")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in LINK.finditer(FENCED.sub("", text)):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", DOCUMENTS, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Two words\n")
    page = tmp_path / "a.md"
    page.write_text(
        '[x](b.md#two-words) [y](https://example.org) ![z](no.png) [q](b.md#three)\n<img alt="" src="c.gif">\n'
    )
    assert dead_links(page) == ["no.png", "b.md#three", "c.gif"]


def test_the_architecture_page_has_a_sentence_for_every_part() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    rows = re.findall(
        r"^\| `(\w+)` \| (.+) \|$", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {name for name, _ in rows} == {part for part in parts if not part.startswith("__")}
    assert [name for name, sentence in rows if not sentence.endswith(".")] == []


def test_the_architecture_page_tells_a_request_s_life_in_steps() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)]
    assert len(numbers) >= 5 and numbers == list(range(1, len(numbers) + 1))


def test_the_readme_and_the_package_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in readme
    assert project["license"] in readme and "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
