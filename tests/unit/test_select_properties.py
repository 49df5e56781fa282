"""Properties of select_backend that hold for any backends, machine, layer and preference (rules S2 to S9)."""

import itertools
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from safelight.attention import AttentionBackend, AttentionRequirements, BackendPreference
from safelight.attention.requirements import MASKS, ROLES
from safelight.platforms import load_machine
from safelight.platforms.facts import PackageFacts
from safelight.platforms.packages import Package
from tests.unit.promises import check_promises

# Names that the platforms' automatic orders know, and some that they don't.
NAMES = ("sdpa", "flash2", "flash3", "flash4", "aiter", "laser", "sliding")
DTYPES = ("float32", "bfloat16", "float16")
MACHINES = tuple(map(load_machine, ("h100", "a100", "mi300x-rocm7", "m4-max", "cpu-avx2")))
BOOL = st.booleans()
SELDOM = st.sampled_from((False,) * 5 + (True,))


def some(values):
    return st.frozensets(st.sampled_from(values))


REQUIREMENTS = st.builds(
    AttentionRequirements,
    head_dim=st.sampled_from((64, 72, 128, 512)),
    dtype=st.sampled_from(DTYPES),
    num_heads=st.just(12),
    num_kv_heads=st.sampled_from((12, 4)),
    role=st.sampled_from(ROLES),
    component=st.sampled_from(("transformer", "text_encoder")),
    is_auxiliary=BOOL,
    causal=SELDOM,
    mask=st.sampled_from((*MASKS, "none", "none")),
    packed_varlen=SELDOM,
    needs_lse=SELDOM,
    scale=st.sampled_from((None, None, 1.0)),
    equal_lengths=BOOL,
)


PRESENT, BROKEN, ABSENT = (
    Package(key=key, dists=(key,), remedy="install it") for key in ("present", "broken", "absent")
)


def made_up(name: str, number: int) -> AttentionBackend:
    """A backend whose every property follows from the number: one draw is far quicker than thirty."""
    digit = random.Random(number).randrange

    def all_but(values):
        return frozenset(value for value in values if digit(8))

    return AttentionBackend(
        name=name,
        summary="made up",
        load=None,
        is_sparse=digit(4) == 1,
        self_only=digit(4) == 1,
        is_lossy=digit(4) == 1,
        aliases=((), (f"{name}_alias",), ("shared",))[digit(3)],
        package=(None, None, PRESENT, PRESENT, BROKEN, ABSENT)[digit(6)],
        arches=({}, {}, {}, {"cuda": ("sm90",)}, {"rocm": ("gfx90a",)})[digit(5)],
        head_dims=(None, lambda head_dim: head_dim <= 128)[digit(2)],
        grouped_query=digit(6) > 0,
        causal=digit(6) > 0,
        packed_varlen=digit(6) > 0,
        lse=digit(6) > 0,
        custom_scale=digit(6) > 0,
        cross_lengths=digit(6) > 0,
        dtypes=all_but(DTYPES),
        masks=all_but(MASKS) | {"none"},
        platforms=all_but(("cuda", "rocm", "mps", "cpu")),
    )


def backends():
    return st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9999), min_size=2).map(
        lambda numbers: {name: made_up(name, number) for name, number in numbers.items()}
    )


@st.composite
def machines(draw):
    packages = {"present": PackageFacts(dist="p"), "broken": PackageFacts(dist="b", import_error="OSError: no")}
    return draw(st.sampled_from(MACHINES)).replace(packages=packages)


def preferences(need, made):
    """Everything that can be preferred for a layer: any name, by a person or not, for all, its component or its role.

    A preference that is given for other layers never gets here.
    """
    aliases = sorted({alias for backend in made.values() for alias in backend.aliases})
    given_for = ("", need.component, f"{need.component}.{need.role}")
    yield None
    for name, explicit, names in itertools.product((*made, *aliases, "nonsense", "auto"), (True, False), given_for):
        yield BackendPreference(name, "somebody", explicit, names)


SUPPORTED = st.none() | some(NAMES)


@settings(max_examples=500)
@given(REQUIREMENTS, machines(), SUPPORTED, backends(), st.randoms(use_true_random=False))
@example(
    AttentionRequirements(head_dim=64, dtype="bfloat16", num_heads=12, num_kv_heads=12),
    MACHINES[0],
    None,
    {},
    random.Random(0),
)
def test_any_selection_keeps_the_promises(need, machine, supported, made, rng) -> None:
    shuffled = list(made.items())
    rng.shuffle(shuffled)
    # Hypothesis draws slowly, so that each example serves several preferences: 6000 cases in all.
    for preference in rng.sample([*preferences(need, made)], 12):
        check_promises(need, machine, preference, supported, made, dict(shuffled))
