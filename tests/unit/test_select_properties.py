"""Properties of select_backend that hold for any backends, machine, layer and preference (rules S2 to S9)."""

import json
import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from safelight.attention import AttentionBackend, AttentionRequirements, BackendPreference, Selection, select_backend
from safelight.attention.requirements import MASKS, ROLES
from safelight.attention.select import why_not
from safelight.errors import SelectionError, error_from_json
from safelight.platforms import load_machine
from safelight.platforms.facts import PackageFacts
from safelight.platforms.packages import Package

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


PREFERENCES = st.none() | st.builds(
    BackendPreference,
    backend=st.sampled_from(
        (*NAMES, *NAMES, *(f"{name}_alias" for name in NAMES), *("shared",) * 3, "nonsense", "auto")
    ),
    source=st.just("somebody"),
    explicit=BOOL,
    names=st.sampled_from(("", "COMPONENT", "COMPONENT.ROLE")),
)
SUPPORTED = st.none() | some(NAMES)


def is_satisfied(need: AttentionRequirements, backend: AttentionBackend) -> bool:
    """Rule S6's capabilities, written down a second time."""
    lacks_lengths = need.role == "cross" and not need.equal_lengths and not backend.cross_lengths
    return (
        need.dtype in backend.dtypes
        and (backend.head_dims is None or backend.head_dims(need.head_dim))
        and (backend.grouped_query or need.num_heads == need.num_kv_heads)
        and (backend.causal or not need.causal)
        and need.mask in backend.masks
        and (backend.packed_varlen or not need.packed_varlen)
        and (backend.lse or not need.needs_lse)
        and (backend.custom_scale or need.scale is None)
        and not lacks_lengths
        and not (need.role == "cross" and backend.is_sparse)
        and not (need.role != "self" and backend.self_only)
    )


@settings(max_examples=500)
@given(REQUIREMENTS, machines(), PREFERENCES, SUPPORTED, backends(), st.randoms(use_true_random=False))
@example(
    AttentionRequirements(head_dim=64, dtype="bfloat16", num_heads=12, num_kv_heads=12),
    MACHINES[0],
    None,
    None,
    {},
    random.Random(0),
)
def test_any_selection_keeps_the_promises(need, machine, preference, supported, made, rng) -> None:
    if preference is not None:
        # A preference that is given for other layers never gets here.
        names = preference.names.replace("COMPONENT", need.component).replace("ROLE", need.role)
        preference = replace(preference, names=names)
    try:
        result: Selection | SelectionError = select_backend(need, machine, preference, supported, made)
    except SelectionError as error:
        result = error

    shuffled = list(made.items())
    rng.shuffle(shuffled)
    try:
        again: Selection | SelectionError = select_backend(need, machine, preference, supported, dict(shuffled))
    except SelectionError as error:
        again = error
    assert type(again) is type(result), "the order of registration matters"
    assert again.to_json() == result.to_json(), "the order of registration matters"

    wish = None if preference is None or preference.backend == "auto" else preference
    asked = None if wish is None else next((n for n in sorted(made) if wish.backend in made[n].aliases), wish.backend)
    usable = [
        name
        for name, backend in made.items()
        if (supported is None or name in supported)
        and is_satisfied(need, backend)
        and (not backend.platforms or machine.platform in backend.platforms)
        and machine.arch in backend.arches.get(machine.platform, (machine.arch,))
        and (backend.package is None or backend.package.key == "present")
    ]
    fitting = [name for name in usable if not (made[name].is_sparse or made[name].is_lossy)]
    assert all(not why_not(name, need, machine, made, supported) for name in fitting)

    if asked in (usable if wish is not None and wish.explicit else fitting):
        assert isinstance(result, Selection) and result.backend == asked, "what was asked for fits, and isn't taken"
    if isinstance(result, SelectionError):
        assert json.loads(json.dumps(result.to_json())) == result.to_json()
        assert type(error_from_json(result.to_json())) is type(result)
        assert all(verdict["reasons"] for verdict in result.details["rejected"])
        if wish is None or not wish.explicit:
            assert fitting == [], "an implicit preference raises although a dense backend fits"
        return

    assert Selection.from_json(json.loads(json.dumps(result.to_json()))) == result
    chosen = made[result.backend]
    assert is_satisfied(need, chosen)
    assert supported is None or chosen.name in supported
    assert not chosen.platforms or machine.platform in chosen.platforms
    assert [verdict.backend for verdict in result.verdicts if not verdict.reasons] == [chosen.name]
    assert result.verdicts[-1].backend == chosen.name
    assert len({verdict.backend for verdict in result.verdicts}) == len(result.verdicts)

    is_asked = wish is not None and wish.explicit and chosen.name == asked
    assert is_asked or chosen.name in fitting, "sparse or lossy, unasked"
    if chosen.name == asked:
        assert result.reason is None
    elif wish is None:
        assert result.reason == "platform default"
    else:
        names_role = wish.names == f"{need.component}.{need.role}"
        first = made.get(asked)
        is_for_self = need.role == "cross" and first is not None and (first.is_sparse or first.self_only)
        if is_for_self and not names_role:
            assert result.reason == "dense cross-attention fallback"
        elif not wish.explicit:
            assert result.reason == "platform default fallback"
        else:
            assert need.is_auxiliary and wish.names == ""
            assert result.reason == f"not required for {need.component}"
