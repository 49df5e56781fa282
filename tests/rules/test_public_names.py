"""What `safelight` offers: every name resolves when it is first used, is typed, and is described."""

import ast
import importlib
import inspect
import re
import subprocess
import sys

import pytest

import safelight
from tests.rules.source import PACKAGE, ROOT, Module, modules

FRONT = Module(PACKAGE / "__init__.py")
NAMES = [name for name in safelight.__all__ if name != "__version__"]
OFFERING = [
    module
    for module in modules()
    if any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" for node in module.tree.body)
]


def for_type_checkers() -> dict[str, str]:
    block = next(node for node in FRONT.tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_type_checkers_and_programs_see_the_same_names() -> None:
    assert for_type_checkers() == dict(safelight._HOMES)
    assert sorted(safelight.__all__) == sorted([*safelight._HOMES, "__version__"])
    assert set(safelight.__all__) <= set(dir(safelight))


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, safelight\n"
        "loaded = lambda: sorted(name for name in sys.modules if name.startswith('safelight.'))\n"
        "assert loaded() == [], loaded()\n"
        "safelight.SafelightError\n"
        "assert loaded() == ['safelight.errors'], loaded()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT / "tests")


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_the_real_thing(name: str) -> None:
    found = getattr(safelight, name)
    assert found is getattr(importlib.import_module(safelight._HOMES[name]), name)
    assert found.__name__ == name
    assert found.__module__ == safelight._HOMES[name]


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Engin'.*Engine"):
        safelight.Engin  # noqa: B018
    assert not hasattr(safelight, "nothing")


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_and_its_methods_are_described(name: str) -> None:
    found = getattr(safelight, name)
    assert found.__doc__ and not found.__doc__.startswith(f"{name}("), "dataclass wrote this one itself"
    members = {key: value for key, value in vars(found).items() if not key.startswith("_")}
    functions = {
        key: getattr(value, "__func__", value)
        for key, value in members.items()
        if inspect.isroutine(value) or isinstance(value, classmethod | staticmethod | property)
    }
    assert [key for key, value in functions.items() if not value.__doc__] == []


def test_the_changelog_names_what_is_public() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if not re.search(rf"`(?:safelight\.)?{name}`", text)] == []


def test_the_version_is_the_changelog_s_newest() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest and newest.group(1) == safelight.__version__


@pytest.mark.parametrize("module", OFFERING, ids=lambda module: module.name)
def test_what_a_package_offers_is_there(module: Module) -> None:
    loaded = importlib.import_module(module.name)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
    assert sorted(set(loaded.__all__)) == sorted(loaded.__all__)
