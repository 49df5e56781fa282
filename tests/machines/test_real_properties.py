"""The promises of selection, over the real declarations on the described machines, for layers and for whole models."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from safelight.attention import (
    AttentionPlan,
    AttentionRequirements,
    BackendPreference,
    build_plan,
    declared_backends,
    select_backend,
)
from safelight.attention.lock import differences
from safelight.attention.requirements import MASKS, ROLES
from safelight.errors import SelectionError
from safelight.planning import layers_of, published_models
from safelight.platforms import MachineFacts, load_machine, machine_names
from tests.unit.promises import check_promises

BACKENDS = declared_backends()
MACHINES = [load_machine(name) for name in machine_names()]
NAMES = sorted({*BACKENDS, *(alias for backend in BACKENDS.values() for alias in backend.aliases)})
GROUPS = {name: layers_of(name)("bfloat16") for name in published_models()}

SELDOM = st.sampled_from((False, False, False, True))
LAYERS = st.builds(
    AttentionRequirements,
    head_dim=st.sampled_from((32, 64, 72, 80, 96, 128, 160, 192, 256, 384, 512)),
    dtype=st.sampled_from(("bfloat16", "float16", "float32")),
    num_heads=st.just(16),
    num_kv_heads=st.sampled_from((16, 16, 4)),
    role=st.sampled_from(ROLES),
    component=st.sampled_from(("transformer", "text_encoder")),
    causal=SELDOM,
    mask=st.sampled_from((*MASKS, *["none"] * 4)),
    packed_varlen=SELDOM,
    needs_lse=SELDOM,
    scale=st.sampled_from((None, None, None, 1.0)),
    equal_lengths=st.booleans(),
).map(lambda need: need.replace(is_auxiliary=need.component == "text_encoder"))
SUPPORTED = st.none() | st.none() | st.frozensets(st.sampled_from(sorted(BACKENDS)))


@st.composite
def machines(draw) -> MachineFacts:
    """A described machine as it is, or one on which some packages are gone, broken or of a version that isn't known."""
    machine = draw(st.sampled_from(MACHINES))
    states: tuple[dict[str, Any] | None, ...] = ({}, {}, {"version": None}, {"import_error": "OSError: no"}, None)
    packages = {
        key: dataclasses.replace(facts, **state)
        for key, facts in machine.packages.items()
        if (state := draw(st.sampled_from(states))) is not None
    }
    return machine.replace(packages=packages)


@settings(max_examples=400)
@given(LAYERS, machines(), SUPPORTED, st.randoms(use_true_random=False))
def test_a_selection_keeps_the_promises(need, machine, supported, rng) -> None:
    shuffled = list(BACKENDS.items())
    rng.shuffle(shuffled)
    given_for = ("", need.component, f"{need.component}.{need.role}")
    wishes = [
        BackendPreference(name, "somebody", explicit, rng.choice(given_for))
        for name in rng.sample(NAMES, 3)
        for explicit in (True, False)
    ]
    for wish in (None, *wishes):
        check_promises(need, machine, wish, supported, BACKENDS, dict(shuffled))


def outcome(decide: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return decide(*arguments)
    except SelectionError as error:
        return error


def nearest(need: AttentionRequirements, sources) -> BackendPreference | None:
    """Rule S1, written down a second time: the first source that speaks of a layer, and in it the narrowest name."""
    narrow = {f"{need.component}.{need.role}": 0, need.component: 1, "": 2}
    said = [
        (number, narrow[wish.names], wish)
        for number, source in enumerate(sources)
        for wish in source
        if wish.names in narrow
    ]
    return min(said, key=lambda entry: entry[:2])[2] if said else None


@settings(max_examples=200)
@given(st.sampled_from(sorted(GROUPS)), st.sampled_from(MACHINES), st.randoms(use_true_random=False))
def test_a_plan_is_each_layer_s_own_selection(model, machine, rng) -> None:
    """What is said for some layers never reaches the others, and a plan survives JSON."""
    groups = GROUPS[model]
    components = sorted({group.requirements.component for group in groups})
    roles = sorted({f"{group.requirements.component}.{group.requirements.role}" for group in groups})
    sources = [
        [
            # Kernels of the machine, mostly: of others only an error could come.
            BackendPreference(rng.choice((*machine_s_own(machine), "auto", "flash_attn")), "somebody", explicit, names)
            for names in rng.sample(("", *components, *roles), rng.randrange(3))
        ]
        for explicit in rng.choices((True, False, False), k=rng.randrange(4))
    ]
    alone = [
        outcome(select_backend, need, machine, nearest(need, sources), group.supported, BACKENDS)
        for group, need in ((group, group.requirements) for group in groups)
    ]
    plan = outcome(build_plan, groups, machine, sources, BACKENDS)
    refused = next((found for found in alone if isinstance(found, SelectionError)), None)
    if refused is not None:
        assert plan.to_json() == refused.to_json()
        return
    assert [layer.selection for layer in plan.layers] == alone
    back = AttentionPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back == plan and differences(back, plan) == []
    assert sum(layer.count for layer in plan.layers) == sum(group.count for group in groups)


def machine_s_own(machine: MachineFacts) -> list[str]:
    return [
        name for name, backend in BACKENDS.items() if not backend.platforms or machine.platform in backend.platforms
    ]


@settings(max_examples=200)
@given(machines(), LAYERS)
def test_facts_that_went_through_json_decide_alike(machine, need) -> None:
    back = MachineFacts.from_json(json.loads(json.dumps(machine.to_json())))
    assert back == machine and hash(back) == hash(machine)
    same = AttentionRequirements.from_json(json.loads(json.dumps(need.to_json())))
    assert same == need
    there, replayed = (
        outcome(select_backend, layer, facts, None, None, BACKENDS).to_json()
        for facts, layer in ((machine, need), (back, same))
    )
    assert there == replayed
