"""Planning: which model is meant, whose preference is nearest, and what the published models' layers are."""

import json
import threading

import pytest

from safelight.attention import declared_backends, forced_attention
from safelight.config import Settings, as_settings
from safelight.errors import CheckpointError, RequestError
from safelight.planning import (
    DEMO,
    PUBLISHED,
    as_preferences,
    check_model,
    chosen_dtype,
    layers_of,
    plan_model,
    preference_sources,
    published_models,
    request_sources,
)
from safelight.platforms import load_machine

CPU = load_machine("cpu-avx2")
BACKENDS = declared_backends()
SETTINGS = Settings.read(
    {"SAFELIGHT_ATTENTION": "transformer=native"},
    '[attention]\ndefault = "auto"\ntransformer.self = "flash3"\n',
)


def sources(attention=None, settings=SETTINGS):
    return preference_sources(argument=attention, argument_source="`--attention` flag", settings=settings)


def nearest(all_sources):
    """Each source as "name=backend" texts with who said so."""
    return [
        (source[0].source, [f"{one.names}={one.backend}" for one in source], source[0].explicit)
        for source in all_sources
        if source
    ]


def test_sources_stand_in_the_order_of_their_nearness() -> None:
    with forced_attention({"vae": "sdpa"}), forced_attention("auto"):
        found = request_sources({"transformer.cross": "flash2"}, sources({"": "sage"}))
    assert nearest(found) == [
        ("`forced_attention` scope", ["=auto"], True),
        ("`forced_attention` scope", ["vae=sdpa"], True),
        ("the request", ["transformer.cross=flash2"], True),
        ("`--attention` flag", ["=sage"], True),
        ("`SAFELIGHT_ATTENTION`", ["transformer=native"], True),
        ("config.toml: attention.default", ["=auto", "transformer.self=flash3"], True),
    ]


def test_settings_that_do_not_say_who_set_them_are_implicit() -> None:
    settings = as_settings({"attention": "flash3"})
    assert nearest(sources(None, settings)) == [("settings that don't say who set them", ["=flash3"], False)]
    plan = plan_model(None, CPU, BACKENDS, sources=sources(None, settings))
    assert {layer.selection.reason for layer in plan.layers} == {"platform default fallback"}


def test_the_forced_scope_of_another_thread_is_not_ours() -> None:
    found = []

    def plan_elsewhere() -> None:
        found.append(request_sources({}, ()))

    with forced_attention("sdpa"):
        thread = threading.Thread(target=plan_elsewhere)
        thread.start()
        thread.join()
        assert nearest(request_sources({}, ())) == [("`forced_attention` scope", ["=sdpa"], True)]
    assert nearest(found[0]) == []


def test_sources_can_be_a_key() -> None:
    """A plan is reused for equal sources, so they must be hashable and compare by value."""
    assert {request_sources({"": "sdpa"}, sources()): 1}[request_sources({"": "sdpa"}, sources())] == 1
    assert request_sources({"": "auto"}, sources()) != request_sources({}, sources())


@pytest.mark.parametrize(
    ("model", "component", "self_layers", "heads"),
    [
        ("wan2.1-1.3b", "transformer", 30, 12),
        ("wan2.1-14b", "transformer", 40, 40),
        ("wan2.2-5b", "transformer", 30, 24),
        ("wan2.2-14b", "transformer_2", 40, 40),
    ],
)
def test_the_layers_of_published_models(model, component, self_layers, heads) -> None:
    groups = layers_of(model)("bfloat16")
    rows = {(g.requirements.component, g.requirements.role): g for g in groups}
    own, cross = rows[component, "self"], rows[component, "cross"]
    assert (own.count, cross.count) == (self_layers, self_layers)
    assert {(g.requirements.head_dim, g.requirements.num_heads) for g in (own, cross)} == {(128, heads)}
    assert cross.requirements.replicated_keys and not own.requirements.replicated_keys
    text = rows["text_encoder", "self"]
    assert (text.count, text.requirements.mask, text.requirements.scale) == (24, "bias", 1.0)
    assert text.requirements.is_auxiliary
    assert rows["vae", "self"].requirements.dtype == "float32"
    assert {g.requirements.dtype for g in groups if g.requirements.component != "vae"} == {"bfloat16"}


def test_every_published_model_has_a_file_and_a_hub_id() -> None:
    documents = {name: json.loads((PUBLISHED / f"{name}.json").read_text()) for name in published_models()}
    assert {"wan2.1-1.3b", "wan2.1-14b", "wan2.2-5b", "wan2.2-14b"} <= set(documents)
    assert [name for name, document in documents.items() if "/" not in document["hub_id"]] == []


def test_a_misspelt_model_is_told_what_is_shipped() -> None:
    with pytest.raises(CheckpointError) as caught:
        layers_of("./wan2.1-14bb")
    assert "shipped configurations are wan2.1-1.3b, wan2.1-14b," in caught.value.message
    assert caught.value.message.endswith("(did you mean wan2.1-14b?)")


def test_weights_of_a_published_model_are_the_hub_s(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"its weights are the hub's Wan-AI/Wan2\.1-T2V-14B-Diffusers: --model"):
        check_model("wan2.1-14b")


def test_a_folder_of_that_name_is_the_checkpoint(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wan2.1-14b").mkdir()
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        layers_of("wan2.1-14b")


def test_a_checkpoint_without_weights_is_planned_all_the_same(tmp_path) -> None:
    for path in DEMO.rglob("*.json"):
        target = tmp_path / path.relative_to(DEMO)
        target.parent.mkdir(exist_ok=True)
        target.write_text(path.read_text())
    assert layers_of(tmp_path)("float32") == layers_of(None)("float32")
    with pytest.raises(CheckpointError, match="no weights"):
        check_model(tmp_path)


def test_a_two_stage_checkpoint_is_planned_like_the_published_one(tmp_path) -> None:
    document = json.loads((PUBLISHED / "wan2.2-14b.json").read_text())
    index = {name: ["diffusers", "Some"] for name in document["components"]}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": document["class_name"], **index}))
    for name, config in document["components"].items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert layers_of(tmp_path)("bfloat16") == layers_of("wan2.2-14b")("bfloat16")
    (tmp_path / "vae" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no configuration of vae"):
        layers_of(tmp_path)("bfloat16")


def test_the_demo_is_planned_without_a_model() -> None:
    plan = plan_model(None, CPU, BACKENDS)
    assert [(layer.requirements.component, layer.selection.backend) for layer in plan.layers] == [
        ("text_encoder", "sdpa"),
        ("transformer", "sdpa"),
        ("transformer", "sdpa"),
        ("vae", "sdpa"),
    ]


@pytest.mark.parametrize(
    ("asked", "settings", "expected"),
    [
        (None, {}, "float32"),
        (None, {"SAFELIGHT_DTYPE": "float16"}, "float16"),
        ("bfloat16", {"SAFELIGHT_DTYPE": "float16"}, "bfloat16"),
    ],
)
def test_the_dtype_is_the_nearest_that_is_said(asked, settings, expected) -> None:
    assert chosen_dtype(asked, Settings.read(settings), CPU) == expected


def test_an_unknown_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError, match="dtype is 'int8'; it must be one of float32, bfloat16, float16"):
        chosen_dtype("int8", Settings(), CPU)


def test_a_misspelt_component_names_those_there_are() -> None:
    wrong = (as_preferences(Settings.read({"SAFELIGHT_ATTENTION": "transfomer=sdpa"}).attention[0]),)
    with pytest.raises(RequestError) as caught:
        plan_model("wan2.2-14b", CPU, BACKENDS, sources=wrong)
    assert "names transfomer, which this model doesn't have (did you mean transformer?)" in caught.value.message
    assert "transformer_2.cross" in caught.value.message
