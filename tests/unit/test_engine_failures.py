"""Engine: runs that fail, prompts that are cut, and checkpoints that are refused or called by odd names."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safelight.engine import Engine
from safelight.errors import CheckpointError, GenerationError, RequestError, error_from_json
from safelight.planning import DEMO
from safelight.request import Result
from tests.wan_reference import copy_checkpoint, edit_json, edit_weights, write_checkpoint

PROMPT = "a red circle moving right"


@pytest.fixture(scope="module")
def demo() -> Engine:
    return Engine.from_pretrained(device="cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights whose runs take no time."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    return Engine.from_pretrained(tiny, device="cpu")


def frames_of(result: Result) -> list[NDArray[np.uint8]]:
    return [output.frames for output in result.outputs]


def same(first: list[NDArray[np.uint8]], second: list[NDArray[np.uint8]]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


def spoil(source: Path, folder: Path, component: str, change: Callable[[dict[str, Tensor]], None]) -> Engine:
    """An engine on a copy with altered weights."""
    copy = copy_checkpoint(source, folder)
    (weights,) = (copy / component).glob("*.safetensors")
    edit_weights(weights, change)
    return Engine.from_pretrained(copy, device="cpu")


def assert_survives_json(error: GenerationError) -> None:
    rebuilt = error_from_json(error.to_json())
    assert type(rebuilt) is type(error) and rebuilt.details == error.details


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_aren_t_finite_are_an_error_that_says_where(tiny: Path, tmp_path: Path, value: float) -> None:
    engine = spoil(tiny, tmp_path / "x", "transformer", lambda tensors: tensors["proj_out.bias"].fill_(value))

    with pytest.raises(GenerationError) as caught:
        engine.generate(PROMPT, num_steps=3)

    assert (caught.value.details["stage"], caught.value.details["step"]) == ("denoise", 1)
    assert "step 1 of 3" in caught.value.message and "float32" in caught.value.message
    assert all(line in caught.value.message for line in engine.plan().lines())
    assert_survives_json(caught.value)


def test_text_states_that_aren_t_finite_are_an_error(tiny: Path, tmp_path: Path) -> None:
    name = "encoder.final_layer_norm.weight"
    engine = spoil(tiny, tmp_path / "x", "text_encoder", lambda tensors: tensors[name].fill_(torch.nan))

    with pytest.raises(GenerationError, match="step 1 of 2"):
        engine.generate(PROMPT)


def test_pixels_that_aren_t_finite_are_an_error(tiny: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["decoder.conv_out.bias"][0] = torch.nan

    with pytest.raises(GenerationError, match="decoded frames are not finite") as caught:
        spoil(tiny, tmp_path / "x", "vae", change).generate(PROMPT)

    assert caught.value.details["stage"] == "decode"
    assert_survives_json(caught.value)


@pytest.mark.parametrize(
    ("levels", "colour"), [((0.25, 0.25, 0.25), r"\[159, 159, 159\]"), ((1.0, -1.0, 0.25), r"\[255, 0, 159\]")]
)
def test_frames_of_one_colour_are_an_error(
    tiny: Path, tmp_path: Path, levels: tuple[float, float, float], colour: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        bias = tensors["decoder.conv_out.bias"]
        tensors["decoder.conv_out.weight"].zero_()
        # A channel's patch positions stand together.
        bias.copy_(torch.tensor(levels).repeat_interleave(len(bias) // 3))

    with pytest.raises(GenerationError, match=f"all have the one colour {colour}, though the latents vary") as caught:
        spoil(tiny, tmp_path / "x", "vae", change).generate(PROMPT)

    assert caught.value.details["stage"] == "decode"


# Prompts


def test_a_prompt_that_is_too_long_is_cut_and_said(demo: Engine) -> None:
    long = "red circle " * 400

    result = demo.generate(long, num_steps=1, num_frames=1)

    (warning,) = result.warnings
    assert "the prompt has " in warning and "512" in warning and "cut" in warning
    assert demo.generate("red circle", negative_prompt=long, num_steps=1, num_frames=1).warnings == (
        warning.replace("the prompt", "the negative prompt"),
    )


# Letters without a blank are one word, which the tiny tokenizer doesn't know; blanks are one blank.
@pytest.mark.parametrize(
    ("text", "is_cut"),
    [("red circle ", True), ("é 🙂 ", True), ("a", False), (" ", False), ("&lt;", False)],
    ids=ascii,
)
def test_a_prompt_of_100_000_characters_takes_bounded_time(engine: Engine, text: str, is_cut: bool) -> None:
    prompt = "red" + text * (100_000 // len(text))
    started_s = time.process_time()

    result = engine.generate(prompt, num_steps=1, num_frames=1, guidance_scale=1)

    assert time.process_time() - started_s < 20
    assert result.request.prompt == prompt
    assert bool(result.warnings) == is_cut


@pytest.mark.parametrize("prompt", ["", "  ", "\n\t"])
def test_an_empty_prompt_is_refused(engine: Engine, prompt: str) -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        engine.generate(prompt)


# Checkpoints


def test_dx_098_a_folder_s_name_and_spelling_change_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("my model (v2)", "flux-but-wan", "模型"):
        copy_checkpoint(tiny, tmp_path / name)
    (tmp_path / "link").symlink_to(tiny)
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0123abc"
    for file in (path for path in tiny.rglob("*") if path.is_file()):
        blob = tmp_path / "hub" / "models--a--b" / "blobs" / f"{file.parent.name}-{file.name}"
        linked = snapshot / file.relative_to(tiny)
        blob.parent.mkdir(parents=True, exist_ok=True)
        linked.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        linked.symlink_to(os.path.relpath(blob, linked.parent))
    spellings: list[str | Path] = [
        tiny,
        str(tiny),
        f"{tiny}/",
        tmp_path / "my model (v2)",
        "flux-but-wan",
        "./flux-but-wan/",
        "~/flux-but-wan",
        "模型",
        "link",
        snapshot,
        "my model (v2)/../模型",
    ]

    def frames(model: str | Path) -> list[NDArray[np.uint8]]:
        engine = Engine.from_pretrained(model, device="cpu")
        return frames_of(engine.generate(PROMPT, seed=1, num_steps=1, num_frames=1))

    expected = frames(tiny)
    assert [spelling for spelling in spellings if not same(frames(spelling), expected)] == []


@pytest.mark.parametrize("model", ["./not-there", "/no/such/folder", "~/nothing here", "模型"])
def test_dx_098_a_path_that_isn_t_there_is_said_to_be_none(model: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder") as caught:
        Engine.from_pretrained(model, device="cpu")

    assert model in caught.value.message


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("model_index.json", {"_class_name": "FooPipeline"}, ["_class_name is FooPipeline", "WanPipeline"]),
        ("model_index.json", {"vae": ["custom_lib", "AutoencoderKLWan"]}, ["vae is of custom_lib", "diffusers"]),
        ("model_index.json", {"transformer": ["diffusers", "Foo"]}, ["transformer is Foo", "WanTransformer3DModel"]),
        ("model_index.json", {"transformer_2": ["diffusers", "WanTransformer3DModel"]}, ["transformer_2"]),
        ("scheduler/scheduler_config.json", {"_class_name": "Foo"}, ["_class_name is 'Foo'", "UniPC"]),
        ("transformer/config.json", {"eps": 7, "ffn_dim": "many"}, ["eps is 7", "ffn_dim is 'many'"]),
        ("safelight.json", {"defaults": {"steps": 4}}, ["unknown defaults ['steps']", "num_steps"]),
        ("safelight.json", {"defaults": {"num_steps": "4"}}, ["defaults: num_steps is '4'"]),
        ("safelight.json", {"trained_sizes": [64]}, ["trained_sizes is [64]"]),
        ("safelight.json", {"trained_max_frames": "17"}, ["trained_max_frames is '17'"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_dx_101_what_can_t_be_run_is_refused_by_file_and_key(
    tiny: Path, tmp_path: Path, file: str, changes: dict[str, Any], said: list[str]
) -> None:
    folder = copy_checkpoint(tiny, tmp_path / "x")
    edit_json(folder / file, **changes)

    with pytest.raises(CheckpointError) as caught:
        Engine.from_pretrained(folder, device="cpu")

    assert [text for text in (*said, str(folder / file)) if text not in caught.value.message] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"in_channels": 5}, ["in_channels is 5", "z_dim is 4"]), ({"num_layers": 3}, ["blocks.2.attn1.to_q.weight"])],
    ids=str,
)
def test_weights_that_a_configuration_doesn_t_fit_are_refused_by_name(
    tiny: Path, tmp_path: Path, changes: dict[str, int], said: list[str]
) -> None:
    folder = copy_checkpoint(tiny, tmp_path / "x")
    edit_json(folder / "transformer" / "config.json", **changes)

    with pytest.raises(CheckpointError) as caught:
        Engine.from_pretrained(folder, device="cpu")

    assert [text for text in (*said, str(folder)) if text not in caught.value.message] == []


@pytest.mark.parametrize("component", ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"])
def test_dx_101_a_missing_component_is_named(tiny: Path, tmp_path: Path, component: str) -> None:
    folder = copy_checkpoint(tiny, tmp_path / "x")
    (folder / component).rename(folder / "elsewhere")

    with pytest.raises(CheckpointError, match=component) as caught:
        Engine.from_pretrained(folder, device="cpu")

    assert str(folder / component) in caught.value.message


def test_the_demo_is_what_no_model_means(demo: Engine) -> None:
    named = Engine.from_pretrained(DEMO, device="cpu")

    assert (demo.model, named.model) == ("demo", str(DEMO))
    fields: dict[str, Any] = {"num_steps": 1, "seed": 1, "num_frames": 1}
    assert same(frames_of(named.generate(PROMPT, **fields)), frames_of(demo.generate(PROMPT, **fields)))


@pytest.mark.parametrize("dtype", ["float8", "Float32", "bf16", ""])
def test_an_unknown_dtype_is_refused_with_those_there_are(tiny: Path, dtype: str) -> None:
    with pytest.raises(RequestError, match="float32, bfloat16, float16"):
        Engine.from_pretrained(tiny, device="cpu", dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_draw_much_the_same(tiny: Path, engine: Engine, dtype: str) -> None:
    half = Engine.from_pretrained(tiny, device="cpu", dtype=dtype)

    found, expected = (frames_of(e.generate(PROMPT, seed=1, num_steps=2))[0].astype(int) for e in (half, engine))

    assert half.dtype == dtype
    assert 0 < float(np.abs(found - expected).mean()) < 3
