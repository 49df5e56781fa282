"""flex, really compiled for this CPU, on a case for each thing that it promises; `doctor --verify` runs them all."""

import pytest
import torch

from safelight.attention.contract import judge
from safelight.attention.machine import this_machine
from safelight.attention.select import found_backends
from safelight.attention.verify import cases_here
from tests.contract.subjects import BACKENDS

BACKEND = BACKENDS["flex"]


@pytest.fixture(scope="module")
def here():
    machine = this_machine(found_backends(), "cpu")
    if "cxx" not in machine.packages:
        pytest.skip("flex is compiled at the first call, and this machine has no C++ compiler")
    return machine


def chosen(machine, dtype):
    """Cases until everything that any of them exercises has been, in every form of a mask and of documents."""
    covered: set[object] = set()
    for case in cases_here(BACKEND, machine, BACKENDS, (dtype,)):
        exercises = {*case.capabilities, case.mask, len(case.documents), case.strides}
        if exercises - covered:
            covered |= exercises
            yield case


# Each case is compiled, which takes seconds, by a part of torch that itself uses what torch deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_flex_promises_holds_when_it_is_compiled(here, dtype, tell_count) -> None:
    cases = list(chosen(here, dtype))
    promised = {"grouped-query", "causal", "packed varlen", "scale", "cross lengths"}
    promised |= {f"mask {mask}" for mask in BACKEND.masks}
    assert set().union(*(case.capabilities for case in cases)) >= promised
    problems = {}
    with torch.inference_mode():
        for case in cases:
            finding = judge(BACKEND.load(case.requirements), case)
            if finding.problem is not None:
                problems[case.name] = finding.problem
    tell_count(f"flex (compiled on {here.arch}, {dtype}): {len(cases)} run")
    assert problems == {}
