"""Every backend with an adapter, for real or through a stand-in for its vendor's package, held to one contract."""

from collections import Counter

import pytest

from safelight.attention import BackendPreference, select_backend
from safelight.attention.cases import cases, declared
from safelight.attention.contract import judge
from safelight.errors import CapabilityError
from tests.contract.subjects import BACKENDS, REAL, SUBJECTS, facts, refusals


def named(subject):
    return f"{subject.backend}-{subject.name}"


RUNS = [
    pytest.param(subject, case, id=f"{named(subject)}-{case.name}")
    for subject in SUBJECTS
    for case in cases(BACKENDS[subject.backend])
]


@pytest.mark.parametrize(("subject", "case"), RUNS)
def test_a_kernel_equals_the_reference_in_what_it_promises_and_is_refused_otherwise(subject, case) -> None:
    backend = BACKENDS[subject.backend]
    if refusals(subject, case):
        # For this very layer: what is asked for in general may fall back in cross-attention.
        names = f"{case.requirements.component}.{case.requirements.role}"
        asked = BackendPreference(backend.name, "a test", explicit=True, names=names)
        with pytest.raises(CapabilityError):
            select_backend(case.requirements, facts(subject), asked, backends=BACKENDS)
        return
    with subject.installed() as calls:
        # A stand-in computes exactly, so that a lossy kernel's adapter has no error to hide in but its own rounding.
        finding = judge(backend.load(case.requirements), case, is_lossy=backend.is_lossy)
    assert finding.problem is None, finding.problem
    assert calls or subject in REAL or 0 in (case.queries, case.keys), "the vendor's function wasn't called"


@pytest.mark.parametrize("name", sorted({subject.backend for subject in SUBJECTS}))
def test_the_declaration_and_the_cases_agree(name, tell_count) -> None:
    """Everything promised is exercised by a case that runs in some release, and no case that runs asks for more."""
    backend = BACKENDS[name]
    exercised: set[str] = set()
    for subject in (subject for subject in SUBJECTS if subject.backend == name):
        ran = [case for case in cases(backend) if not refusals(subject, case)]
        counts = Counter(capability for case in ran for capability in case.capabilities)
        tell_count(f"{name} ({subject.name}): {len(ran)} run, {len(cases(backend)) - len(ran)} are refused")
        assert set(counts) <= declared(backend)
        exercised |= set(counts)
    missing = declared(backend) - exercised
    assert not missing, f"promised and never exercised: {sorted(missing)}"


def test_every_backend_with_an_adapter_is_a_subject() -> None:
    assert {subject.backend for subject in SUBJECTS} == {b.name for b in BACKENDS.values() if b.load is not None}
