"""What the contract is applied to: each backend with an adapter, and the stand-ins that make its vendor's package."""

from safelight_stand_ins import STAND_INS, StandIn

from safelight.attention.cases import Case
from safelight.attention.select import declared_backends, why_not

BACKENDS = declared_backends()

# What needs nobody's package and runs on the CPU.
REAL = (StandIn(name="torch's own", backend="sdpa", machine="cpu-avx2", modules=lambda recorder: {}, packages={}),)
SUBJECTS = (*REAL, *STAND_INS)


def refusals(subject: StandIn, case: Case) -> list[str]:
    """Why selection refuses a case on the subject's machine; only capabilities may be missing there."""
    found = why_not(subject.backend, case.requirements, subject.facts(), BACKENDS, is_explicit=True, runs_here=True)
    assert {reason.kind for reason in found} <= {"capability"}, found
    return [reason.detail for reason in found]
