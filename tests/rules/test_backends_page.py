"""docs/backends.md is what the declarations say."""

from safelight.attention import declared_backends
from tests.rules.backends_page import PAGE, page


def test_the_page_is_what_the_declarations_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew, as its first lines say"


def test_every_backend_is_on_it_with_all_its_names() -> None:
    text = page()
    for backend in declared_backends().values():
        assert f"### {backend.name}\n" in text
        assert all(f"`{alias}`" in text for alias in backend.aliases)
