"""Every file says what it is, is short enough to be one thing, and holds nothing that belongs elsewhere."""

import ast
import re
from pathlib import Path

import pytest

from tests.rules.source import PACKAGE, ROOT, Module, modules, python_files, shown, text_files

PYTHON = python_files()
TEXT = [path for path in text_files() if path != Path(__file__).resolve()]

MOST_LINES = 500

# A folder of one particular machine means nothing on another.
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:data|home|mnt|root|scratch|srv|tmp|Users|work|workspace)/\w")
# What is left to do is an issue, not a remark.
NOTE_TO_SELF = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|WIP)\b")
# Links lead to papers, projects and standards. Where packages come from is pip's business, on each machine its own.
URL = re.compile(r"https?://([\w.-]+)")
LINKED = {
    *("arxiv.org", "datatracker.ietf.org", "git-lfs.github.com", "github.com", "huggingface.co", "json-schema.org"),
    *("keepachangelog.com", "semver.org", "www.apache.org", "www.itu.int", "www.w3.org"),
    *("docs.python.org", "pytorch.org", "docs.pytorch.org"),
    *("127.0.0.1", "localhost", "example.com", "example.org"),
}
# Words that say nothing about what a thing is.
EMPTY_NAME = re.compile(
    r"Manager|Helper|Utils?(?![a-z])|Impl(?![a-z])|(?:^|_)(?:manager|helpers?|utils?|impl)(?:_|$)|^_?get_"
)


@pytest.mark.parametrize("path", PYTHON, ids=shown)
def test_a_file_opens_with_a_sentence(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, "the file has no docstring: say in one sentence what it is"
    first = docstring.split("\n", 1)[0]
    assert re.fullmatch(r"\S.{8,}[.:]", first), f"the first line is no sentence: {first!r}"
    assert docstring == first or docstring.startswith(f"{first}\n\n"), "an empty line follows the first sentence"


@pytest.mark.parametrize("path", [path for path in TEXT if path.suffix in (".py", "")], ids=shown)
def test_a_file_is_one_thing(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: which two things is it?"


@pytest.mark.parametrize("path", TEXT, ids=shown)
def test_nothing_in_a_file_belongs_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = [match.group() for pattern in (MACHINE_PATH, NOTE_TO_SELF) for match in pattern.finditer(text)]
    found += [match.group() for match in URL.finditer(text) if match.group(1) not in LINKED]
    assert found == []


def test_what_belongs_elsewhere_is_seen() -> None:
    assert MACHINE_PATH.search("see /home/me/x") and MACHINE_PATH.search('"/root/x"')
    assert not MACHINE_PATH.search("docs/work/x") and not MACHINE_PATH.search("https://example.org/data/x")
    assert NOTE_TO_SELF.search("# TODO: later") and not NOTE_TO_SELF.search("mastodon")
    assert EMPTY_NAME.search("KernelManager") and EMPTY_NAME.search("get_plan") and EMPTY_NAME.search("path_utils")
    assert EMPTY_NAME.search("SdpaImpl") and EMPTY_NAME.search("Utils")
    assert (
        not EMPTY_NAME.search("target_size") and not EMPTY_NAME.search("Implicit") and not EMPTY_NAME.search("Utility")
    )


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_names_say_what_a_thing_is(module: Module) -> None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = [(node.lineno, node.name) for node in ast.walk(module.tree) if isinstance(node, kinds)]
    assert [(line, name) for line, name in [(1, module.path.stem), *names] if EMPTY_NAME.search(name)] == []


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [shown(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_text_files_are_found() -> None:
    """The rules above would pass on anything if they looked at nothing."""
    names = {shown(path) for path in TEXT}
    assert {"README.md", "pyproject.toml", "scripts/setup", ".ci/run", "src/safelight/errors.py"} <= names
    assert ROOT / "tests/conftest.py" in PYTHON
