"""The promises of selection, over the real declarations on the described machines."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from safelight.attention import AttentionRequirements, BackendPreference, declared_backends, select_backend
from safelight.attention.requirements import MASKS, ROLES
from safelight.attention.select import why_not
from safelight.errors import SelectionError
from safelight.platforms import load_machine, machine_names

BACKENDS = declared_backends()
MACHINES = [load_machine(name) for name in machine_names()]
NAMES = (*BACKENDS, *(alias for backend in BACKENDS.values() for alias in backend.aliases))
CHANGES_THE_PICTURE = {name for name, backend in BACKENDS.items() if backend.is_sparse or backend.is_lossy}

LAYERS = st.builds(
    AttentionRequirements,
    head_dim=st.sampled_from((32, 64, 72, 80, 96, 128, 160, 192, 256, 384, 512)),
    dtype=st.sampled_from(("bfloat16", "float16", "float32")),
    num_heads=st.just(16),
    num_kv_heads=st.sampled_from((16, 16, 4)),
    role=st.sampled_from(ROLES),
    component=st.sampled_from(("transformer", "text_encoder")),
    causal=st.booleans(),
    mask=st.sampled_from(MASKS),
    packed_varlen=st.booleans(),
    needs_lse=st.booleans(),
    scale=st.sampled_from((None, 1.0)),
    equal_lengths=st.booleans(),
).map(lambda need: need.replace(is_auxiliary=need.component == "text_encoder"))
WISHES = st.none() | st.builds(
    BackendPreference, st.sampled_from(NAMES), st.just("somebody"), st.booleans(), st.sampled_from(("", "C", "C.R"))
)


def outcome(need, machine, wish):
    try:
        return select_backend(need, machine, wish, None, BACKENDS)
    except SelectionError as error:
        return error


@settings(max_examples=1000)
@given(LAYERS, st.sampled_from(MACHINES), WISHES, st.integers(0, 2**16))
def test_a_choice_is_the_result_an_error_or_one_of_two_fallbacks(need, machine, wish, seed) -> None:
    if wish is not None:
        names = wish.names.replace("C", need.component).replace("R", need.role)
        wish = BackendPreference(wish.backend, wish.source, wish.explicit, names)
    fitting = [name for name in BACKENDS if not why_not(name, need, machine, BACKENDS)]
    asked = None if wish is None else next(n for n, b in BACKENDS.items() if wish.backend in (n, *b.aliases))
    shuffled = list(BACKENDS.items())
    random.Random(seed).shuffle(shuffled)
    result = outcome(need, machine, wish)
    if isinstance(result, SelectionError):
        assert (wish is not None and wish.explicit) or fitting == []
        assert all(verdict["reasons"] for verdict in result.details["rejected"])
        return
    assert select_backend(need, machine, wish, None, dict(shuffled)) == result
    assert not why_not(result.backend, need, machine, BACKENDS, is_explicit=result.backend == asked)
    assert all(verdict.reasons for verdict in result.rejected)
    is_explicit = wish is not None and wish.explicit
    assert result.backend not in CHANGES_THE_PICTURE or (is_explicit and result.backend == asked)
    if not is_explicit or result.backend == asked:
        return
    if result.reason == "dense cross-attention fallback":
        first = BACKENDS[asked]
        assert need.role == "cross" and (first.is_sparse or first.self_only) and not wish.names.endswith(".cross")
    else:
        assert result.reason == f"not required for {need.component}"
        assert need.is_auxiliary and wish.names == ""
