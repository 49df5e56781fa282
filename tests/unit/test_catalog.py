"""The catalogue: built-in modules, entry points of installed packages, and those that fail."""

import sys
from pathlib import Path

import pytest

from safelight.catalog import LoadFailure, built_in, cause_of, declarations

THING = "class Thing:\n    def __init__(self, name):\n        self.name = name\n"


class Site:
    """A directory on sys.path into which a test installs packages."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def install(self, dist: str, *entry_points: str) -> None:
        """A distribution whose entry points are in the group "catalogue.things"."""
        self.write(f"{dist}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        self.write(f"{dist}-1.0.dist-info/entry_points.txt", "\n".join(["[catalogue.things]", *entry_points]) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site with a package `shelf` of two declarations, b before c, and a class for them."""
    site = Site(tmp_path)
    site.write("shelf_thing.py", THING)
    site.write("shelf/__init__.py")
    site.write("shelf/c.py", "from shelf_thing import Thing\nTHING = Thing('c')\n")
    site.write("shelf/b.py", "from shelf_thing import Thing\nTHING = Thing('b')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        del sys.modules[name]


def found(**options):
    return declarations("shelf", "THING", "catalogue.things", **options)


def names(result):
    return [declaration.name for declaration in result]


def test_modules_come_in_the_order_of_their_names(site):
    assert names(built_in("shelf", "THING")) == ["b", "c"]
    assert names(found().declarations) == ["b", "c"]
    assert found().failures == ()


def test_modules_that_hold_no_declaration(site):
    site.write("shelf/_private.py", "raise RuntimeError('never imported')\n")
    site.write("shelf/machines/notes.json", "{}")
    site.write("shelf/spec.py", "raise RuntimeError('never imported')\n")
    assert names(found(besides=("spec",)).declarations) == ["b", "c"]


def test_a_module_without_its_constant_is_our_bug(site):
    site.write("shelf/empty.py")
    with pytest.raises(AssertionError, match=r"shelf\.empty holds no THING"):
        found()


def test_an_error_in_a_built_in_module_is_not_hidden(site):
    site.write("shelf/wrong.py", "raise ImportError('ours')\n")
    with pytest.raises(ImportError, match="ours"):
        found()


def test_entry_points_come_after_the_modules(site):
    site.write("acme.py", "from shelf_thing import Thing\nONE = Thing('a')\nTWO = Thing('z')\n")
    site.install("acme", "two = acme:TWO", "one = acme:ONE")
    assert names(found().declarations) == ["b", "c", "a", "z"]
    assert names(built_in("shelf", "THING")) == ["b", "c"]


BREAKAGES = {
    "import": ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
    "os": ("raise OSError('libx.so: undefined symbol')", "OSError: libx.so: undefined symbol"),
    "runtime": ("raise RuntimeError('no driver\\nsecond line')", "RuntimeError: no driver"),
    "attribute": ("import sys; sys.nothing_here", "AttributeError: module 'sys' has no attribute 'nothing_here'"),
    "assertion": ("assert False", "AssertionError"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "type": ("None + 1", "TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'"),
    "value": ("int('2.8.0.post2')", "ValueError: invalid literal for int() with base 10: '2.8.0.post2'"),
    "key": ("{}['HOME']", "KeyError: 'HOME'"),
    "name": ("undefined_name", "NameError: name 'undefined_name' is not defined"),
    "division": ("1 / 0", "ZeroDivisionError: division by zero"),
    "syntax": ("def", "SyntaxError: invalid syntax (broken.py, line 1)"),
    "warning": ("raise DeprecationWarning('old')", "DeprecationWarning: old"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_dx_080_a_plugin_that_breaks_while_it_is_imported_is_one_recorded_failure(site, breakage):
    code, cause = BREAKAGES[breakage]
    site.write("broken.py", code + "\n")
    site.write("acme.py", "from shelf_thing import Thing\nONE = Thing('a')\n")
    site.install("acme", "one = acme:ONE")
    site.install("bad", "bad = broken:THING")
    result = found()
    assert names(result.declarations) == ["b", "c", "a"]
    assert result.failures == (LoadFailure("bad", cause, "bad = broken:THING of bad 1.0"),)


def test_an_entry_point_that_names_nothing(site):
    site.write("acme.py")
    site.install("acme", "one = acme:MISSING")
    (failure,) = found().failures
    assert failure.cause == "AttributeError: module 'acme' has no attribute 'MISSING'"


@pytest.mark.parametrize(("value", "kind"), [("acme", "module"), ("acme:TEXT", "str"), ("acme:NONE", "NoneType")])
def test_an_entry_point_that_names_something_else(site, value, kind):
    site.write("acme.py", "TEXT = 'sdpa'\nNONE = None\n")
    site.install("acme", f"one = {value}")
    result = found()
    assert names(result.declarations) == ["b", "c"]
    assert [failure.cause for failure in result.failures] == [f"it is of class {kind}, not Thing"]


def test_cancelling_is_not_a_broken_plugin(site):
    site.write("acme.py", "raise KeyboardInterrupt\n")
    site.install("acme", "one = acme:ONE")
    with pytest.raises(KeyboardInterrupt):
        found()


def test_a_plugin_with_a_built_in_name_is_a_failure_that_says_whose(site):
    site.write("acme.py", "from shelf_thing import Thing\nONE = Thing('c')\n")
    site.install("acme-kernels", "one = acme:ONE")
    declared, (failure,) = found()
    assert [thing.name for thing in declared] == ["b", "c"]
    assert failure.cause == "it claims the name 'c', which is that of shelf.c"
    assert failure.origin == "one = acme:ONE of acme-kernels 1.0"


def test_of_two_plugins_with_one_name_the_first_counts(site):
    site.write("acme.py", "from shelf_thing import Thing\nONE = Thing('x')\n")
    site.write("bolt.py", "from shelf_thing import Thing\nONE = Thing('x')\n")
    site.install("bolt", "one = bolt:ONE")
    site.install("acme", "one = acme:ONE")
    declared, (failure,) = found()
    assert [thing.name for thing in declared] == ["b", "c", "x"]
    assert failure.cause == "it claims the name 'x', which is that of the entry point one = acme:ONE of acme 1.0"


def test_other_names_that_a_declaration_has_count_too(site):
    site.write("acme.py", "from shelf_thing import Thing\nONE = Thing('x')\nTWO = Thing('y')\n")
    site.install("acme", "one = acme:ONE", "two = acme:TWO")
    declared, (failure,) = found(names=lambda thing: (thing.name, "c" if thing.name == "y" else thing.name + "2"))
    assert [thing.name for thing in declared] == ["b", "c", "x"]
    assert (failure.name, failure.cause) == ("two", "it claims the name 'c', which is that of shelf.c")


def test_a_name_declared_twice_in_the_package_is_our_bug(site):
    site.write("shelf/d.py", "from shelf_thing import Thing\nTHING = Thing('c')\n")
    with pytest.raises(AssertionError, match=r"THING c is declared by shelf\.c and by shelf\.d"):
        found()


def test_nothing_is_remembered_between_calls(site):
    assert found().declarations[0] is found().declarations[0]
    site.write("acme.py", "from shelf_thing import Thing\nONE = Thing('a')\n")
    site.install("acme", "one = acme:ONE")
    assert names(found().declarations) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError("\n  first \nsecond"), "OSError: first"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError("   "), "RuntimeError"),
        (SystemExit(), "SystemExit"),
    ],
)
def test_cause_of_is_one_line(error, cause):
    assert cause_of(error) == cause
