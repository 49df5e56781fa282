"""AttentionPlan: built for all layers, printable, comparable and JSON; what a person names wrongly is refused."""

import json
from dataclasses import replace

import pytest

from safelight.attention import (
    AttentionBackend,
    AttentionPlan,
    AttentionRequirements,
    BackendPreference,
    LayerGroup,
    build_plan,
    declared_backends,
)
from safelight.errors import BackendNotSupportedError, CapabilityError, RequestError
from safelight.platforms import MachineFacts, load_machine
from tests.unit.site_packages import install

MACHINE = load_machine("h100")
SELF = AttentionRequirements(head_dim=64, dtype="bfloat16", num_heads=4, num_kv_heads=4, equal_lengths=True)
CROSS = SELF.replace(role="cross", equal_lengths=False)
TEXT = SELF.replace(component="text_encoder", is_auxiliary=True, mask="bias", scale=1.0)
GROUPS = (
    LayerGroup(requirements=TEXT, count=2),
    LayerGroup(requirements=SELF, count=30),
    LayerGroup(requirements=CROSS, count=30),
)
BACKENDS = {
    "sdpa": declared_backends()["sdpa"],
    "sliding": AttentionBackend(name="sliding", summary="made up", load=None, is_sparse=True, aliases=("slide",)),
}


def flag(name, names="", source="`--attention` flag"):
    return BackendPreference(name, source, True, names)


def plan_for(*sources, groups=GROUPS):
    return build_plan(groups, MACHINE, sources, BACKENDS)


def test_every_group_has_its_selection_in_order() -> None:
    plan = plan_for([flag("sliding")])
    assert [(layer.requirements, layer.count) for layer in plan.layers] == [(TEXT, 2), (SELF, 30), (CROSS, 30)]
    assert [(layer.selection.backend, layer.selection.reason) for layer in plan.layers] == [
        ("sdpa", "not required for text_encoder"),
        ("sliding", None),
        ("sdpa", "dense cross-attention fallback"),
    ]


def test_one_line_for_each_component() -> None:
    assert plan_for().lines() == [
        "text_encoder: self x2 sdpa (platform default)",
        "transformer: self x30 sdpa (platform default), cross x30 sdpa (platform default)",
    ]
    plan = plan_for([flag("slide")])
    assert plan.lines() == [
        "text_encoder: self x2 sdpa (not required for text_encoder)",
        "transformer: self x30 sliding (`--attention` flag), cross x30 sdpa (dense cross-attention fallback)",
    ]
    assert str(plan) == "\n".join(plan.lines())


def test_the_public_json() -> None:
    data = plan_for([flag("sliding", "transformer")]).to_json()
    assert list(data) == ["machine", "layers"]
    assert data["machine"] == MACHINE.to_json()
    rows = data["layers"]
    columns = ["component", "role", "count", "backend", "reason", "preference", "requirements", "rejected"]
    assert [list(row) for row in rows] == [columns] * 3
    assert rows[0]["preference"] is None and rows[0]["rejected"] == []
    assert rows[1]["preference"] == {
        "backend": "sliding",
        "source": "`--attention` flag",
        "explicit": True,
        "names": "transformer",
    }
    assert rows[2] == {
        "component": "transformer",
        "role": "cross",
        "count": 30,
        "backend": "sdpa",
        "reason": "dense cross-attention fallback",
        "preference": rows[1]["preference"],
        "requirements": CROSS.to_json(),
        "rejected": [
            {
                "backend": "sliding",
                "reasons": [
                    {
                        "kind": "capability",
                        "detail": "no role cross (a sparse kernel has nothing to leave out there)",
                    }
                ],
            }
        ],
    }


@pytest.mark.parametrize(
    "sources",
    [
        [],
        [[flag("sliding")]],
        [[BackendPreference("sliding", "the request", True, "transformer", (("tile", 8),))], [flag("auto")]],
        [[BackendPreference("flash9", "platform default", False)]],
    ],
)
def test_a_plan_round_trips_through_json(sources) -> None:
    plan = plan_for(*sources)
    again = AttentionPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.to_json() == plan.to_json()


def test_plans_compare_by_value() -> None:
    plan = plan_for()
    assert plan == plan_for()
    assert plan != plan_for([flag("sdpa")]), "who wanted it is part of a plan"
    assert plan != plan_for([flag("sliding")])
    assert plan != plan.replace(machine=load_machine("a100"))
    assert plan != plan.replace(layers=plan.layers[:2])
    layer = plan.layers[0]
    unlike = replace(layer, selection=replace(layer.selection, verdicts=()))
    assert plan != plan.replace(layers=(unlike, *plan.layers[1:])), "what was considered is part of a plan"


def test_layers_with_equal_requirements_may_differ_in_their_scope() -> None:
    limited = LayerGroup(requirements=CROSS, count=2, supported=frozenset({"sdpa"}))
    plan = plan_for([flag("auto")], groups=[LayerGroup(requirements=CROSS, count=3), limited])
    assert [layer.supported for layer in plan.layers] == [None, frozenset({"sdpa"})]
    assert AttentionPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_kind_of_layer_stands_in_one_group() -> None:
    group = LayerGroup(requirements=SELF, count=1)
    with pytest.raises(AssertionError, match="are one group"):
        plan_for([], groups=[group, group])


# S3: a component or role that the model doesn't have

KNOWN = "text_encoder, text_encoder.self, transformer, transformer.cross, transformer.self"


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        ("transfomer", " (did you mean transformer?)"),
        ("transfomer.self", " (did you mean transformer.self?)"),
        ("transformer.joint", ""),
        ("text_encoder.cross", ""),
        ("cross", ""),
    ],
)
def test_a_component_or_role_that_is_not_there_is_refused(names, hint) -> None:
    for backend in ("sdpa", "auto"):
        with pytest.raises(RequestError) as caught:
            plan_for([flag(backend, names)])
        assert caught.value.message == (
            f"`--attention` flag names {names}, which this model doesn't have{hint}; it has {KNOWN}"
        )
        assert caught.value.details["known"] == KNOWN.split(", ")


def test_every_wrong_name_is_named_with_its_source() -> None:
    near, far = [flag("sdpa", "vea"), flag("sdpa", "tokenizer")], [flag("sdpa", "refiner", "`SAFELIGHT_ATTENTION`")]
    with pytest.raises(RequestError) as caught:
        plan_for(near, far)
    assert caught.value.details["names"] == ["vea", "tokenizer", "refiner"]
    assert "`SAFELIGHT_ATTENTION` names refiner" in caught.value.message


def test_a_habit_for_a_component_that_is_not_there_is_no_failure() -> None:
    plan = plan_for([BackendPreference("sliding", "platform default", False, "image_encoder")])
    assert plan == plan_for()


def test_a_slip_in_a_backends_name_is_refused_also_where_it_is_a_wish() -> None:
    """The transformer has its own choice, so the wrong name would reach nothing but the text encoder."""
    with pytest.raises(BackendNotSupportedError) as caught:
        plan_for([flag("spda"), flag("sdpa", "transformer")])
    assert caught.value.message == (
        "`--attention` flag asks for spda: no backend has this name (did you mean sdpa?), there are sdpa, sliding"
    )
    assert caught.value.details["layer"] == "text_encoder.self"
    assert [verdict["backend"] for verdict in caught.value.details["rejected"]] == ["spda"]


def test_a_refusal_stops_the_plan() -> None:
    with pytest.raises(CapabilityError) as caught:
        plan_for([flag("sliding", "transformer.cross")])
    assert caught.value.details["layer"] == "transformer.cross"


def test_a_layers_own_set_is_kept() -> None:
    groups = (LayerGroup(requirements=SELF, count=1, supported=frozenset({"sliding"})),)
    with pytest.raises(BackendNotSupportedError, match="not supported by this attention layer"):
        plan_for([flag("sdpa")], groups=groups)
    assert plan_for([flag("sliding")], groups=groups).layers[0].selection.backend == "sliding"


# A platform's own preference


def test_a_platform_may_prefer_a_backend_and_that_is_implicit(tmp_path, monkeypatch) -> None:
    text = """
from safelight.platforms import Platform
PLATFORM = Platform(
    name="habitual", torch_device="habitual", automatic_order=lambda machine: ("sdpa",), probe=lambda torch: None,
    default_dtype=lambda machine: "bfloat16", preference=lambda machine: "habit",
)
"""
    points = "[safelight.platforms]\nhabitual = platform_with_a_habit:PLATFORM\n"
    install(tmp_path, "habitual", files={"platform_with_a_habit.py": text}, entry_points=points)
    monkeypatch.syspath_prepend(str(tmp_path))
    machine = MachineFacts(platform="habitual")
    backends = BACKENDS | {"habit": AttentionBackend(name="habit", summary="made up", load=None)}
    rows = build_plan(GROUPS, machine, (), backends).layers
    # The text encoder's mask is beyond it: never a failure.
    assert [(row.selection.backend, row.selection.reason) for row in rows] == [
        ("sdpa", "platform default fallback"),
        ("habit", None),
        ("habit", None),
    ]
    assert rows[1].selection.preference == BackendPreference("habit", "platform habitual", False)
    auto = build_plan(GROUPS, machine, [[flag("auto")]], backends).layers
    assert [(row.selection.backend, row.selection.reason) for row in auto] == [("sdpa", "platform default")] * 3
