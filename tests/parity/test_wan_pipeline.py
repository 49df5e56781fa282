"""Whole runs of Wan checkpoints against diffusers' WanPipeline, and what a run costs: passes, and work done twice."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safelight.engine import Engine
from safelight.errors import CheckpointError, RequestError
from safelight.models.wan import WanTransformer
from safelight.pipelines.wan.pipeline import TEXT_LENGTH, WanPipeline
from safelight.planning import DEMO
from safelight.request import Request
from safelight.sampling.flow import Euler
from tests.wan_reference import (
    bind_sdpa,
    copy_checkpoint,
    edit_json,
    edit_weights,
    open_pipeline,
    relative_error,
    write_checkpoint,
)

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4  # of the largest latent
PROMPT = "a red circle moving right"


@dataclass(frozen=True)
class Run:
    """The latents of each step, the noise first, and frames uint8 [frames, height, width, 3]."""

    latents: list[Tensor]
    frames: NDArray[np.uint8]


def open_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from diffusers import WanPipeline as Reference

    pipe = Reference.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def demo() -> WanPipeline:
    return open_pipeline(None)


@pytest.fixture(scope="module")
def demo_reference() -> Any:
    return open_reference(DEMO)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with Wan 2.1's VAE and Wan 2.1's own scheduler, UniPC."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", scheduler=scheduler)


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """Batch rows of each call of a Wan transformer while the test runs."""
    rows: list[int] = []

    def count(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, WanTransformer):
            rows.append(len(args[0]))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    yield rows
    handle.remove()


def run(pipeline: WanPipeline, request: Request) -> Run:
    request = pipeline.checkpoint.resolve(request)
    assert request.seed is not None
    with torch.inference_mode():
        text, _ = pipeline.encode(request)
        latents = [state.latents for state in pipeline.denoise(request, text, [request.seed])]
        pixels = pipeline.decode(latents[-1], lambda step, num_steps: None)
    return Run(latents, pixels[0].mul(255).round().byte().numpy())


def run_reference(pipe: Any, pipeline: WanPipeline, request: Request) -> Run:
    """The same request with diffusers."""
    request = pipeline.checkpoint.resolve(request)
    assert request.seed is not None
    latents: list[Tensor] = []

    def keep(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(tensors["latents"].clone())
        return tensors

    frames = pipe(
        request.prompt,
        request.negative_prompt,
        height=request.height,
        width=request.width,
        num_frames=request.num_frames,
        num_inference_steps=request.num_steps,
        guidance_scale=request.guidance_scale,
        guidance_scale_2=request.guidance_scale_2 if pipeline.checkpoint.transformer_2 else None,
        generator=torch.Generator().manual_seed(request.seed),
        callback_on_step_end=keep,
    ).frames[0]
    noise = torch.randn(latents[0].shape, generator=torch.Generator().manual_seed(request.seed))
    return Run([noise, *latents], (frames * 255).round().astype(np.uint8))


def assert_equal_runs(found: Run, expected: Run) -> None:
    assert torch.equal(found.latents[0], expected.latents[0])
    errors = [relative_error(*pair) for pair in zip(found.latents, expected.latents, strict=True)]
    assert max(errors) <= TOLERANCE, errors
    assert found.frames.shape == expected.frames.shape
    assert int(np.abs(found.frames.astype(int) - expected.frames.astype(int)).max()) <= 1


@pytest.mark.parametrize("guidance", [None, 1, 7.5], ids=["default", "one-branch", "strong"])
@pytest.mark.parametrize("num_frames", [1, 9, 17])
def test_a_demo_run_is_the_reference_s(
    demo: WanPipeline, demo_reference: Any, num_frames: int, guidance: float | None
) -> None:
    request = Request(prompt=PROMPT, num_frames=num_frames, guidance_scale=guidance, num_steps=4, seed=7)

    assert_equal_runs(run(demo, request), run_reference(demo_reference, demo, request))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": PROMPT, "negative_prompt": "a blue square, moving left, and rather more words than the prompt has"},
        {"prompt": "square", "width": 96, "height": 32},
        {"prompt": "Ein grüner Kreis &amp; 一个圆 🟢\n nach   unten", "num_steps": 1},
        {"prompt": "blue triangle going up " * 200, "negative_prompt": "red"},
    ],
    ids=["negative", "oblong", "unicode", "too-long"],
)
def test_prompts_and_sizes_are_taken_as_the_reference_takes_them(
    demo: WanPipeline, demo_reference: Any, fields: dict[str, Any]
) -> None:
    request = Request(**{"num_steps": 3, "num_frames": 5, "seed": 11} | fields)

    assert_equal_runs(run(demo, request), run_reference(demo_reference, demo, request))


@pytest.mark.parametrize("num_steps", [1, 2, 6])
@pytest.mark.parametrize("num_frames", [1, 9])
def test_a_unipc_run_is_the_reference_s(tiny: Path, num_frames: int, num_steps: int) -> None:
    pipeline, pipe = open_pipeline(tiny), open_reference(tiny)
    request = Request(prompt=PROMPT, num_frames=num_frames, num_steps=num_steps, seed=3)

    found = run(pipeline, request)

    assert type(pipe.scheduler).__name__ == "UniPCMultistepScheduler"
    assert_equal_runs(found, run_reference(pipe, pipeline, request))
    assert_equal_runs(run(pipeline, request), found)  # the solver starts anew each time


def test_schedules_of_other_spacing_are_the_reference_s(tiny: Path, tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    folder = copy_checkpoint(tiny, tmp_path / "karras")
    FlowMatchEulerDiscreteScheduler(shift=5.0, use_karras_sigmas=True).save_pretrained(folder / "scheduler")
    edit_json(folder / "model_index.json", scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"])
    pipeline, pipe = open_pipeline(folder), open_reference(folder)
    request = Request(prompt=PROMPT, num_steps=4, seed=3)

    assert_equal_runs(run(pipeline, request), run_reference(pipe, pipeline, request))


def test_timesteps_for_every_token_make_no_difference_to_text_to_video(tiny: Path, tmp_path: Path) -> None:
    folder = copy_checkpoint(tiny, tmp_path / "wan-2.2")
    edit_json(folder / "model_index.json", expand_timesteps=True)
    pipeline, pipe = open_pipeline(folder), open_reference(folder)
    request = Request(prompt=PROMPT, num_frames=5, num_steps=3, seed=3)

    assert pipe.config.expand_timesteps
    assert_equal_runs(run(pipeline, request), run_reference(pipe, pipeline, request))


def two_stages(folder: Path, ratio: float) -> Path:
    """A checkpoint in the form of Wan 2.2's large models."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    # Without a shift, 8 steps have timesteps of 1000, 857.3, 714.6, ...
    return write_checkpoint(folder, scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), boundary_ratio=ratio)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_stages(tmp_path_factory.mktemp("models") / "staged", 0.875)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """The component and the batch rows of each call of a Wan transformer."""
    calls: list[tuple[str, int]] = []

    def count(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, WanTransformer):
            calls.append((module.blocks[0].attn1.attend.requirements.component, len(args[0])))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    yield calls
    handle.remove()


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.875, 1.0])
@pytest.mark.parametrize("num_steps", [1, 5])
def test_dx_037_two_stages_are_the_reference_s(staged: Path, tmp_path: Path, ratio: float, num_steps: int) -> None:
    folder = copy_checkpoint(staged, tmp_path / "model")
    edit_json(folder / "model_index.json", boundary_ratio=ratio)
    pipeline, pipe = open_pipeline(folder), open_reference(folder)
    request = Request(prompt=PROMPT, num_steps=num_steps, seed=3)
    assert pipe.transformer_2 is not None and pipe.config.boundary_ratio == ratio
    assert_equal_runs(run(pipeline, request), run_reference(pipe, pipeline, request))


@pytest.mark.parametrize(
    ("timesteps", "boundary", "first"),
    [
        ([1000.0, 875.0, 874.0], 875.0, 2),  # exactly at the boundary it is still the first one
        ([1000.0, 875.001, 874.999], 875.0, 2),
        ([900.0, 800.0, 700.0], 875.0, 1),
        ([800.0, 700.0], 875.0, 0),
        ([1000.0, 500.0, 0.5], 0.0, 3),
        ([999.0, 500.0], 1000.0, 0),
    ],
)
def test_dx_037_the_second_stage_begins_below_the_boundary(
    staged: Path, stages: list[tuple[str, int]], timesteps: list[float], boundary: float, first: int, monkeypatch: Any
) -> None:
    pipeline = open_pipeline(staged)
    pipeline.checkpoint = dataclasses.replace(pipeline.checkpoint, boundary=boundary)
    solver = Euler(torch.tensor([*timesteps, 0.0]) / 1000)
    monkeypatch.setattr("safelight.pipelines.wan.pipeline.solver_from_config", lambda config, num_steps: solver)
    run(pipeline, Request(prompt=PROMPT, num_steps=len(timesteps), seed=3))
    expected = ["transformer"] * first + ["transformer_2"] * (len(timesteps) - first)
    assert [component for component, _ in stages] == expected


@pytest.mark.parametrize(
    ("scales", "rows"), [((5.0, None), (2, 2)), ((5.0, 1.0), (2, 1)), ((1.0, 4.0), (1, 2)), ((1.0, None), (1, 1))]
)
def test_dx_037_each_stage_has_its_own_guidance(
    staged: Path, stages: list[tuple[str, int]], scales: tuple[float, float | None], rows: tuple[int, int]
) -> None:
    pipeline, pipe = open_pipeline(staged), open_reference(staged)
    request = Request(prompt=PROMPT, negative_prompt="blue", num_steps=4, seed=3, guidance_scale=scales[0])
    request = request.replace(guidance_scale_2=scales[1])
    found = run(pipeline, request)
    assert stages == [("transformer", rows[0])] * 1 + [("transformer_2", rows[1])] * 3
    # The reference runs the negative branch, in both stages, where the first scale asks for it.
    if scales[0] > 1:
        assert_equal_runs(found, run_reference(pipe, pipeline, request))


def test_two_stages_on_an_engine_have_plans_checks_and_metadata_of_both(staged: Path) -> None:
    engine = Engine.from_pretrained(staged, device="cpu", check_attention="first")
    result = engine.generate(PROMPT, num_steps=4, seed=3, guidance_scale_2=2.0, num_outputs=2)
    assert {layer.requirements.component for layer in result.plan.layers} >= {"transformer", "transformer_2"}
    checked = {str(check).partition(":")[0] for check in result.attention_checks}
    assert checked >= {"transformer.self", "transformer.cross", "transformer_2.self", "transformer_2.cross"}
    assert (result.request.guidance_scale, result.request.guidance_scale_2) == (5.0, 2.0)
    with pytest.raises(RequestError, match=r"guidance_scale_2 is 2; this model has one stage: leave it out"):
        Engine.from_pretrained(device="cpu").generate(PROMPT, guidance_scale_2=2.0)


def test_bfloat16_errs_no_more_than_the_reference_does(tiny: Path) -> None:
    exact, pipeline, pipe = open_pipeline(tiny), open_pipeline(tiny, "bfloat16"), open_reference(tiny, torch.bfloat16)
    request = Request(prompt=PROMPT, num_frames=9, num_steps=4, seed=3)
    truth = run(exact, request).latents

    ours = [relative_error(*pair) for pair in zip(run(pipeline, request).latents, truth, strict=True)]
    theirs = [relative_error(*pair) for pair in zip(run_reference(pipe, exact, request).latents, truth, strict=True)]

    assert ours[0] == 0
    assert max(ours) <= max(1.25 * max(theirs), 0.01)


@pytest.mark.parametrize("prompt", ["a", PROMPT, "x " * 700, " &lt;b&gt; café ｆｕｌｌ ", "", "🙂 一只猫"])
def test_dx_011_text_states_are_the_reference_s_and_zero_past_the_prompt(
    demo: WanPipeline, demo_reference: Any, prompt: str
) -> None:
    with torch.inference_mode():
        text, _ = demo.encode(Request(prompt=prompt or "any", negative_prompt=prompt, guidance_scale=2.0))
        expected, _ = demo_reference.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=512)
    tokens = text.num_tokens[1]

    states = torch.zeros(TEXT_LENGTH, text.states.shape[2])
    states[: text.states.shape[1]] = text.states[1]

    assert torch.count_nonzero(states[tokens:]) == 0 and torch.count_nonzero(expected[0, tokens:]) == 0
    assert states[:tokens].abs().sum(1).gt(0).all()
    assert relative_error(states, expected[0]) <= 1e-5


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "unmerged"])
def test_dx_011_the_transformer_sees_zero_rows_past_the_prompt(tiny: Path, merges: bool) -> None:
    pipeline = open_pipeline(tiny)
    bind_sdpa(pipeline.transformer, takes_bias=merges)
    seen: list[Tensor] = []
    pipeline.transformer.condition_embedder.text_embedder.register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    )
    request = pipeline.checkpoint.resolve(Request(prompt="a red", negative_prompt="", seed=3))
    with torch.inference_mode():
        text, _ = pipeline.encode(request)
        assert len(list(pipeline.denoise(request, text, [3]))) > 2

    (states,) = seen
    longest = max(text.num_tokens)
    assert states.shape[:2] == (2, longest + 1 if merges else TEXT_LENGTH)
    for row, tokens, encoded in zip(states, text.num_tokens, text.states, strict=True):
        assert torch.equal(row[:tokens], encoded[:tokens]) and torch.count_nonzero(row[:tokens]) > 0
        assert torch.count_nonzero(row[tokens:]) == 0


@pytest.mark.parametrize("negative", [None, "blurry"])
@pytest.mark.parametrize(
    ("guidance", "rows"), [(None, 2), (0, 1), (0.0, 1), (1, 1), (1.0, 1), (1.0001, 2), (5, 2)], ids=str
)
def test_dx_001_guidance_decides_how_many_rows_pass(
    tiny: Path, passes: list[int], guidance: float | None, rows: int, negative: str | None
) -> None:
    engine = Engine.from_pretrained(tiny, device="cpu")

    result = engine.generate(PROMPT, guidance_scale=guidance, negative_prompt=negative, num_steps=3, seed=1)

    assert passes == [rows] * 3
    assert result.request.guidance_scale == (5.0 if guidance is None else guidance)
    assert result.to_json()["request"]["guidance_scale"] == result.request.guidance_scale


def test_dx_001_without_guidance_the_negative_prompt_changes_nothing(tiny: Path) -> None:
    pipeline = open_pipeline(tiny)

    def latents(guidance: float, negative: str | None) -> Tensor:
        request = Request(prompt=PROMPT, negative_prompt=negative, guidance_scale=guidance, num_frames=1, seed=1)
        return run(pipeline, request).latents[-1]

    assert torch.equal(latents(1, "blurry"), latents(1, None)) and torch.equal(latents(0, "x"), latents(1, None))
    assert not torch.equal(latents(1.5, "blurry"), latents(1.5, None))
    assert not torch.equal(latents(1.0001, None), latents(1, None))


def calls_during(work: Callable[[], object]) -> Counter[str]:
    """How often each function of ours was called: "rope.rotary_table" and so on."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, arg: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("safelight."):
            calls[f"{module.rpartition('.')[2]}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_what_the_steps_share_is_computed_once_and_nothing_is_selected(tiny: Path) -> None:
    pipeline = open_pipeline(tiny)
    request = pipeline.checkpoint.resolve(Request(prompt=PROMPT, num_steps=5, seed=3))
    with torch.inference_mode():
        text, _ = pipeline.encode(request)
        calls = calls_during(lambda: list(pipeline.denoise(request, text, [3])))

    assert calls["wan.WanTransformer.forward"] == 5
    for once in ("rope.rotary_table", "wan.WanTransformer.text_context", "wan.WanTransformer._modulate"):
        assert calls[once] == 1, once
    num_layers = len(pipeline.transformer.blocks)
    assert calls["wan.WanCrossAttention.keys_values"] == num_layers
    assert calls["layer.Attention.forward"] == 2 * num_layers * 5
    selecting = ("select.", "plan.", "runtime.", "catalog.", "config.", "detect.")
    assert [name for name in calls if name.startswith(selecting)] == []


def test_selecting_is_seen_where_it_happens(tiny: Path) -> None:
    engine = Engine.from_pretrained(tiny, device="cpu")

    calls = calls_during(lambda: engine.resolve(Request(prompt=PROMPT, attention={"transformer": "sdpa"})))

    assert calls["select.select_backend"] == 4 and calls["plan.build_plan"] == 1


def untie(folder: Path, stored_as: str) -> None:
    """Leave one name for the token embedding, and say that it isn't tied."""
    names = {"shared.weight", "encoder.embed_tokens.weight"}

    def change(tensors: dict[str, Tensor]) -> None:
        (present,) = names & set(tensors)
        tensors[stored_as] = tensors.pop(present)

    edit_weights(folder / "text_encoder" / "model.safetensors", change)
    edit_json(folder / "text_encoder" / "config.json", tie_word_embeddings=False)


@pytest.mark.parametrize("stored_as", ["shared.weight", "encoder.embed_tokens.weight"])
def test_dx_028_an_embedding_that_is_stored_once_is_tied(tiny: Path, tmp_path: Path, stored_as: str) -> None:
    folder = copy_checkpoint(tiny, tmp_path / "untied")
    untie(folder, stored_as)
    engines = [Engine.from_pretrained(path, device="cpu") for path in (folder, tiny)]
    fields: dict[str, Any] = {"seed": 5, "num_steps": 2, "guidance_scale": 1, "num_frames": 1}

    untied, tied = ([engine.generate(p, **fields).outputs[0].frames for p in (PROMPT, "blue")] for engine in engines)

    assert not np.array_equal(untied[0], untied[1])
    assert np.array_equal(untied[0], tied[0]) and np.array_equal(untied[1], tied[1])


def test_dx_028_an_embedding_that_is_stored_nowhere_stops_the_load(tiny: Path, tmp_path: Path) -> None:
    folder = copy_checkpoint(tiny, tmp_path / "lost")
    untie(folder, "elsewhere.weight")

    with pytest.raises(CheckpointError, match=r"shared\.weight") as caught:
        Engine.from_pretrained(folder, device="cpu")

    assert "elsewhere.weight" in caught.value.message
