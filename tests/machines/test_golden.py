"""The plan on every described machine and the text of every kind of refusal are as the golden files have them."""

import pytest

from safelight.attention import declared_backends
from safelight.errors import SelectionError, error_from_json
from safelight.platforms import load_machine, machine_names, platform_named
from tests.machines.golden import ERRORS, PLANS, errors, kinds_of_layers, plan_text

REFUSALS = errors()


@pytest.mark.parametrize("name", machine_names())
def test_the_plan_is_the_golden_one(name) -> None:
    path = PLANS / f"{name}.txt"
    assert path.exists(), "a machine without a golden plan: python -m tests.machines.golden"
    assert plan_text(name) == path.read_text(), "if the change is meant: python -m tests.machines.golden"


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_the_refusal_is_the_golden_one(name) -> None:
    assert REFUSALS[name] == (ERRORS / f"{name}.txt").read_text()


def test_no_golden_file_is_left_over() -> None:
    assert sorted(path.stem for path in PLANS.iterdir()) == sorted(machine_names())
    assert sorted(path.stem for path in ERRORS.iterdir()) == sorted(REFUSALS)


def test_every_kind_of_error_has_a_golden_refusal() -> None:
    found = {text.partition(",")[0] for text in REFUSALS.values()}
    assert found == {kind.__name__ for kind in SelectionError.__subclasses__()}
    assert all(error_from_json({"error": kind, "message": "", "details": {}}) for kind in found)


@pytest.mark.parametrize("name", sorted(name for name in REFUSALS if name != "no_backend"))
def test_a_refusal_says_who_asked_for_which_layer_and_what_would_do(name) -> None:
    text = " ".join(REFUSALS[name].split())
    assert "no attention backend for " in text and " on " in text and "Refused: " in text
    assert ("(`--attention` flag)" in text) == (name != "nothing_supported")
    assert ("These would do: " in text and "pick one with --attention " in text) == (name != "nothing_supported")


@pytest.mark.parametrize("name", machine_names())
def test_the_first_of_the_order_that_is_there_serves_wan(name) -> None:
    """DESIGN's table, against the plan: the platform's best kernel whose package is whole here serves both roles."""
    machine, backends = load_machine(name), declared_backends()
    order = platform_named(machine.platform).automatic_order(machine)
    rows = {line[:21].strip(): line.split()[-1] for line in plan_text(name).splitlines() if line[:1] not in (" ", "")}
    usable = []
    for backend in order:
        package = backends[backend].package
        facts = None if package is None else machine.packages.get(package.key)
        if package is None or (facts is not None and facts.import_error is None):
            usable.append(backend)
    assert rows["wan 1.3b self"] in usable
    assert order.index(rows["wan 1.3b self"]) <= order.index(rows["wan 1.3b cross"])
    assert rows["float32"] == rows["head_dim 512"] == "sdpa" or machine.platform == "npu"
    assert {kind for kind in rows if kind in kinds_of_layers(machine)} == set(kinds_of_layers(machine))
