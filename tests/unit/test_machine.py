"""This machine: the platform's facts, and the packages and switches of the backends that are declared."""

import pytest

from safelight.attention import AttentionBackend
from safelight.attention.machine import could_run, this_machine
from safelight.catalog import Found, LoadFailure
from safelight.platforms import load_machine
from safelight.platforms.packages import Package
from tests.unit.site_packages import install

MARK = "import pathlib; (pathlib.Path(__file__).parent / 'imported').touch()\n"


def made_up(name, **fields):
    package = Package(key=name, dists=(name,), remedy="install it", module=name, function="attend")
    return AttentionBackend(**{"name": name, "summary": name, "load": lambda need: None, "package": package, **fields})


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A package `acme` that notes when it is imported."""
    install(tmp_path, "acme", "2.1", files={"acme/__init__.py": f"{MARK}def attend(q, k, v, scale): ...\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "acme" / "imported"


def test_a_package_that_could_be_used_here_is_imported_in_a_process_of_its_own(site) -> None:
    facts = this_machine(Found((made_up("acme"),), ()), "cpu").packages["acme"]
    assert (facts.version, facts.parameters, facts.import_error) == ("2.1", ("q", "k", "v", "scale"), None)
    assert site.exists()


@pytest.mark.parametrize("fields", [{"load": None}, {"platforms": frozenset({"npu"})}], ids=["adapter", "platform"])
def test_any_other_is_recognised_and_left_alone(site, fields) -> None:
    facts = this_machine(Found((made_up("acme", **fields),), ()), "cpu").packages["acme"]
    assert (facts.version, facts.parameters) == ("2.1", None)
    assert not site.exists()


def test_imports_all_asks_every_package(site) -> None:
    found = Found((made_up("acme", load=None),), ())
    assert this_machine(found, "cpu", imports_all=True).packages["acme"].parameters == ("q", "k", "v", "scale")


def test_two_backends_of_one_package_ask_it_once_where_either_could_run(site) -> None:
    one, other = made_up("acme", load=None), made_up("acme")
    for pair in ((one, other), (other, one)):
        assert this_machine(Found(pair, ()), "cpu").packages["acme"].parameters is not None


def test_what_isn_t_installed_is_no_package() -> None:
    """What the platform itself has found stays: a compiler on a CPU machine."""
    assert set(this_machine(Found((made_up("nobody_has_this"),), ()), "cpu").packages) <= {"cxx"}


def test_switches_are_those_that_a_declaration_names(monkeypatch) -> None:
    monkeypatch.setenv("ACME_FAST", "1")
    monkeypatch.setenv("ACME_OTHER", "1")
    found = Found((made_up("nobody_has_this", env=("ACME_FAST", "ACME_UNSET")),), ())
    assert dict(this_machine(found, "cpu").env) == {"ACME_FAST": "1"}


def test_a_plug_in_that_fails_is_a_note() -> None:
    failure = LoadFailure("acme", "ImportError: no", "acme = acme:BACKEND of acme 2.1")
    notes = this_machine(Found((made_up("nobody_has_this"),), (failure,)), "cpu").notes
    assert "the backend plug-in acme = acme:BACKEND of acme 2.1 doesn't load: ImportError: no" in notes


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"load": None}, False),
        ({"platforms": frozenset({"cuda"})}, True),
        ({"platforms": frozenset({"rocm"})}, False),
        ({"arches": {"cuda": ("sm90",)}}, True),
        ({"arches": {"cuda": ("sm80",)}}, False),
        ({"arches": {"rocm": ("gfx942",)}}, True),
    ],
    ids=str,
)
def test_could_run(fields, expected) -> None:
    assert could_run(made_up("x", **fields), load_machine("h100")) is expected
