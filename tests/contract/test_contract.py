"""Every backend with an adapter, for real or through a stand-in for its vendor's package, held to one contract."""

from collections import Counter

import pytest
from safelight_stand_ins import STAND_INS, StandIn

from safelight.attention import BackendPreference, select_backend
from safelight.attention.cases import Case, cases, declared
from safelight.attention.contract import judge
from safelight.attention.select import declared_backends, why_not
from safelight.errors import CapabilityError
from safelight.platforms import load_machine

BACKENDS = declared_backends()
# What needs nobody's package and runs on the CPU.
REAL = StandIn(name="torch's own", backend="sdpa", machine="cpu-avx2", modules=lambda recorder: {}, packages={})
SUBJECTS = (REAL, *STAND_INS)


def refusals(subject: StandIn, case: Case) -> list[str]:
    found = why_not(subject.backend, case.requirements, subject.facts(), BACKENDS, is_explicit=True, runs_here=True)
    assert {reason.kind for reason in found} <= {"capability"}, found
    return [reason.detail for reason in found]


def parameters():
    for subject in SUBJECTS:
        for case in cases(BACKENDS[subject.backend]):
            yield pytest.param(subject, case, id=f"{subject.backend}-{subject.name}-{case.name}")


@pytest.mark.parametrize(("subject", "case"), list(parameters()))
def test_a_kernel_equals_the_reference_in_what_it_promises_and_is_refused_otherwise(subject, case) -> None:
    backend = BACKENDS[subject.backend]
    if refusals(subject, case):
        with pytest.raises(CapabilityError):
            select_backend(case.requirements, subject.facts(), BackendPreference(backend.name, "a test", explicit=True))
        return
    with subject.installed() as calls:
        finding = judge(backend.load(case.requirements), case)
    assert finding.problem is None, finding.problem
    assert calls or subject is REAL or 0 in (case.queries, case.keys), "the vendor's function wasn't called"


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.backend}-{subject.name}")
def test_the_declaration_and_the_cases_agree(subject) -> None:
    """Everything promised is exercised by a case that runs, and no case that runs asks for more."""
    backend = BACKENDS[subject.backend]
    ran = [case for case in cases(backend) if not refusals(subject, case)]
    exercised = Counter(capability for case in ran for capability in case.capabilities)
    facts_limit = declared(backend) - set(exercised)
    print(f"{backend.name} ({subject.name}): {len(ran)} cases run, {len(cases(backend)) - len(ran)} are refused")
    assert set(exercised) <= declared(backend)
    assert not facts_limit, f"promised and never exercised: {sorted(facts_limit)}"


def test_every_backend_with_an_adapter_is_a_subject() -> None:
    assert {subject.backend for subject in SUBJECTS} == {b.name for b in BACKENDS.values() if b.load is not None}


def test_a_described_machine_is_right_for_each() -> None:
    assert load_machine("cpu-avx2").platform == "cpu"
