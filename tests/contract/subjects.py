"""What the contract is applied to: each backend with an adapter, and the stand-ins that make its vendor's package."""

from safelight_stand_ins import STAND_INS, StandIn

from safelight.attention.cases import Case
from safelight.attention.select import declared_backends, why_not
from safelight.platforms import MachineFacts

BACKENDS = declared_backends()

# What needs nobody's package and runs on the CPU.
REAL = (StandIn(name="torch's own", backend="sdpa", machine="cpu-avx2", modules=lambda recorder: {}, packages={}),)
SUBJECTS = (*REAL, *STAND_INS)
FACTS = {(subject.backend, subject.name): subject.facts() for subject in SUBJECTS}
assert len(FACTS) == len(SUBJECTS), "a stand-in's name tells it from the others of its backend"


def facts(subject: StandIn) -> MachineFacts:
    """The machine that a subject is used on."""
    return FACTS[subject.backend, subject.name]


def refusals(subject: StandIn, case: Case) -> list[str]:
    """Why selection refuses a case on the subject's machine; only capabilities may be missing there."""
    found = why_not(subject.backend, case.requirements, facts(subject), BACKENDS, is_explicit=True, runs_here=True)
    assert {reason.kind for reason in found} <= {"capability"}, found
    return [reason.detail for reason in found]
