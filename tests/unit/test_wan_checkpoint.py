"""WanCheckpoint: what is refused before any weight is read, and what a request gets from the model."""

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from safelight.errors import CheckpointError, RequestError
from safelight.planning import DEMO, check_model
from safelight.request import Request

TRANSFORMER = ["diffusers", "WanTransformer3DModel"]


@pytest.fixture
def demo_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "my model"))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_the_demo_says_what_it_is() -> None:
    groups = check_model(None).layer_groups("float32")
    rows = [(g.requirements.component, g.requirements.role, g.count, g.requirements.mask) for g in groups]
    assert rows == [
        ("text_encoder", "self", 2, "bias"),
        ("transformer", "self", 5, "none"),
        ("transformer", "cross", 5, "none"),
        ("vae", "self", 1, "none"),
    ]
    assert [g.requirements.head_dim for g in groups[1:3]] == [64, 64]


def test_defaults_are_the_checkpoints_own() -> None:
    request = check_model(None).resolve(Request(prompt="x"))
    assert (request.width, request.height, request.num_frames, request.fps) == (64, 64, 9, Fraction(8))
    assert (request.num_steps, request.guidance_scale) == (20, 3.0)


def test_without_a_manifest_the_defaults_are_wans(demo_copy: Path) -> None:
    (demo_copy / "safelight.json").unlink()
    request = check_model(demo_copy).resolve(Request(prompt="x"))
    assert (request.width, request.height, request.num_frames, request.fps) == (832, 480, 81, Fraction(16))
    assert (request.num_steps, request.guidance_scale) == (50, 5.0)


def test_a_zero_is_not_a_default() -> None:
    assert check_model(None).resolve(Request(prompt="x", guidance_scale=0)).guidance_scale == 0


@pytest.mark.parametrize(
    ("width", "nearest"), [(63, "64"), (65, "64"), (72, "64"), (73, "80"), (1, "16"), (100_000, "16384")]
)
def test_a_size_off_the_grid_is_refused_with_the_nearest(width: int, nearest: str) -> None:
    with pytest.raises(RequestError, match=rf"^width is {width}; .*the nearest is {nearest}\b"):
        check_model(None).resolve(Request(prompt="x", width=width))


def test_width_height_and_frames_are_refused_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        check_model(None).resolve(Request(prompt="x", width=60, height=50, num_frames=8))
    assert caught.value.details["fields"] == ["width", "height", "num_frames"]


def test_leaving_what_the_model_was_trained_on_is_a_warning() -> None:
    checkpoint = check_model(None)
    assert checkpoint.warnings(checkpoint.resolve(Request(prompt="x"))) == ()
    found = checkpoint.warnings(checkpoint.resolve(Request(prompt="x", width=96, num_frames=33)))
    assert ["96x64" in found[0], "17 frames" in found[1]] == [True, True]


@pytest.mark.parametrize("class_name", ["FooPipeline", "WanImageToVideoPipeline", "wanpipeline"])
def test_dx_101_an_unknown_pipeline_is_refused_with_those_there_are(demo_copy: Path, class_name: str) -> None:
    edit(demo_copy / "model_index.json", lambda index: index.update(_class_name=class_name))
    with pytest.raises(CheckpointError, match=rf"_class_name is {class_name}; the pipelines are WanPipeline"):
        check_model(demo_copy)


@pytest.mark.parametrize("component", ["tokenizer", "text_encoder", "transformer", "vae", "scheduler"])
def test_dx_101_a_missing_component_is_named(demo_copy: Path, component: str) -> None:
    shutil.rmtree(demo_copy / component)
    with pytest.raises(CheckpointError, match=component):
        check_model(demo_copy)


@pytest.mark.parametrize(
    ("component", "kind"),
    [("transformer", "FluxTransformer2DModel"), ("vae", "AutoencoderKL"), ("text_encoder", "T5EncoderModel")],
)
def test_dx_101_a_component_of_another_class_is_refused(demo_copy: Path, component: str, kind: str) -> None:
    edit(demo_copy / "model_index.json", lambda index: index.update({component: ["diffusers", kind]}))
    with pytest.raises(CheckpointError, match=f"{component} is {kind}; text-to-video Wan has"):
        check_model(demo_copy)


@pytest.mark.parametrize("name", ["FooScheduler", None])
def test_dx_101_an_unknown_scheduler_is_refused(demo_copy: Path, name: str | None) -> None:
    edit(demo_copy / "scheduler" / "scheduler_config.json", lambda config: config.update(_class_name=name))
    with pytest.raises(CheckpointError, match=r"scheduler_config.json.*the schedulers are FlowMatchEuler"):
        check_model(demo_copy)


def test_a_scheduler_that_draws_noise_of_its_own_is_refused(demo_copy: Path) -> None:
    edit(demo_copy / "scheduler" / "scheduler_config.json", lambda config: config.update(stochastic_sampling=True))
    with pytest.raises(CheckpointError, match="stochastic_sampling"):
        check_model(demo_copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"boundary_ratio": 0.875}, "boundary_ratio is there and transformer_2 isn't"),
        ({"transformer_2": TRANSFORMER}, "transformer_2 is there and boundary_ratio isn't"),
        ({"transformer_2": TRANSFORMER, "boundary_ratio": "high"}, "boundary_ratio is 'high'; it must be a number"),
        ({"transformer_2": TRANSFORMER, "boundary_ratio": 875}, "boundary_ratio is 875; it must be a number from 0"),
        ({"transformer_2": ["diffusers", "X"], "boundary_ratio": 0.9}, "transformer_2 is X; text-to-video Wan has"),
    ],
)
def test_dx_037_half_of_two_stages_is_refused(demo_copy: Path, change: dict[str, Any], said: str) -> None:
    (demo_copy / "transformer_2").mkdir()
    edit(demo_copy / "model_index.json", lambda index: index.update(change))
    with pytest.raises(CheckpointError, match=said):
        check_model(demo_copy)


def test_dx_037_a_second_stage_that_is_not_there_or_does_not_fit_is_refused(demo_copy: Path) -> None:
    both = {"transformer_2": TRANSFORMER, "boundary_ratio": 0.875}
    edit(demo_copy / "model_index.json", lambda index: index.update(both))
    with pytest.raises(CheckpointError, match="transformer_2: missing"):
        check_model(demo_copy)
    shutil.copytree(demo_copy / "transformer", demo_copy / "transformer_2")
    checkpoint = check_model(demo_copy)
    assert checkpoint.resolve(Request(prompt="a", guidance_scale=4.0)).guidance_scale_2 == 4.0
    edit(demo_copy / "safelight.json", lambda manifest: manifest["defaults"].update(guidance_scale_2=2.5))
    checkpoint = check_model(demo_copy)
    assert checkpoint.resolve(Request(prompt="a")).guidance_scale_2 == 2.5
    assert checkpoint.resolve(Request(prompt="a", guidance_scale=4.0)).guidance_scale_2 == 4.0
    edit(demo_copy / "transformer_2" / "config.json", lambda config: config.update(patch_size=[1, 1, 1], text_dim=32))
    with pytest.raises(CheckpointError, match=r"transformer_2 text_dim is 32.*transformer_2 patch_size is \(1, 1, 1\)"):
        check_model(demo_copy)


@pytest.mark.parametrize(("key", "value"), [("image_dim", 1280), ("added_kv_proj_dim", 256), ("qk_norm", None)])
def test_a_transformer_of_another_kind_is_refused(demo_copy: Path, key: str, value: Any) -> None:
    edit(demo_copy / "transformer" / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(CheckpointError, match=f"{key} is"):
        check_model(demo_copy)


def test_components_that_do_not_fit_are_refused_together(demo_copy: Path) -> None:
    edit(demo_copy / "transformer" / "config.json", lambda config: config.update(text_dim=32, in_channels=16))
    with pytest.raises(CheckpointError, match=r"text_dim is 32.*in_channels is 16"):
        check_model(demo_copy)


def test_an_unknown_default_is_refused(demo_copy: Path) -> None:
    edit(demo_copy / "safelight.json", lambda manifest: manifest["defaults"].update(steps=3))
    with pytest.raises(CheckpointError, match=r"unknown defaults \['steps'\]"):
        check_model(demo_copy)
