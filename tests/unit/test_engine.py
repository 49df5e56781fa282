"""Engine: what a request gets, what is refused before it starts, and what stops it on the way."""

import itertools
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safelight.config import Settings
from safelight.engine import Engine
from safelight.errors import (
    Cancelled,
    RequestError,
    SelectionError,
)
from safelight.pipelines.wan.pipeline import WanPipeline
from safelight.request import CancelToken, Progress, Request, Result
from tests.wan_reference import (
    edit_json,
    open_pipeline,
    relative_error,
    write_checkpoint,
)

PROMPT = "a red circle moving right"
LARGEST_SEED = 2**63 - 1


@pytest.fixture(scope="module")
def demo() -> Engine:
    return Engine.from_pretrained(device="cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights whose runs take no time."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokens are so small that one output fills a batch."""
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "large", patch_size=[1, 1, 1], num_layers=1)
    defaults = {"width": 192, "height": 192, "num_frames": 1, "num_steps": 2, "guidance_scale": 5.0}
    edit_json(folder / "safelight.json", defaults=defaults)
    return folder


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    return Engine.from_pretrained(tiny, device="cpu")


@pytest.fixture(scope="module")
def pipeline(tiny: Path) -> WanPipeline:
    return open_pipeline(tiny)


def frames_of(result: Result) -> list[NDArray[np.uint8]]:
    return [output.frames for output in result.outputs]


def states_of(pipeline: WanPipeline, request: Request, seeds: list[int]) -> list[Tensor]:
    """The latents of every step, the noise first, for outputs that run together."""
    request = pipeline.checkpoint.resolve(request)
    with torch.inference_mode():
        text, _ = pipeline.encode(request)
        return [state.latents for state in pipeline.denoise(request, text, seeds)]


def same(first: list[NDArray[np.uint8]], second: list[NDArray[np.uint8]]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(first, second, strict=True))


# What a request gets


def test_the_demo_makes_what_was_asked(demo: Engine) -> None:
    result = demo.generate(PROMPT, num_steps=4, seed=7, num_frames=5, fps=12)

    (output,) = result.outputs
    assert output.frames.dtype == np.uint8 and output.frames.shape == (5, 64, 64, 3)
    assert (output.seed, output.fps, output.path) == (7, Fraction(12), None)
    assert result.model == "demo" and result.plan == demo.plan()
    assert set(result.timings_s) == {"encode", "denoise", "decode"} and min(result.timings_s.values()) > 0
    assert result.request == demo.resolve(Request(prompt=PROMPT, num_steps=4, seed=7, num_frames=5, fps=Fraction(12)))


def test_what_a_request_leaves_open_is_filled_in(demo: Engine) -> None:
    resolved = demo.resolve(Request(prompt="x"))

    assert resolved.seed is not None and 0 <= resolved.seed <= LARGEST_SEED
    assert resolved.replace(seed=None) == Request(
        prompt="x",
        negative_prompt="",
        width=64,
        height=64,
        num_frames=9,
        fps=Fraction(8),
        num_steps=20,
        guidance_scale=3.0,
    )
    assert demo.resolve(resolved) == resolved


def test_what_a_request_says_stays(demo: Engine) -> None:
    request = Request(
        prompt="x",
        negative_prompt="y",
        width=96,
        height=32,
        num_frames=1,
        fps=Fraction(24000, 1001),
        num_steps=1,
        guidance_scale=0,
        seed=0,
        num_outputs=3,
    )

    assert demo.resolve(request) == request


def test_unseeded_requests_draw_seeds_of_their_own(engine: Engine) -> None:
    first, second = (engine.generate(PROMPT) for _ in range(2))

    assert first.request.seed != second.request.seed
    assert not same(frames_of(first), frames_of(second))
    assert same(frames_of(engine.generate(PROMPT, seed=first.request.seed)), frames_of(first))


# Seeds


def test_the_same_seed_gives_the_same_bits(demo: Engine) -> None:
    first, second = (demo.generate(PROMPT, num_steps=3, seed=7) for _ in range(2))

    assert same(frames_of(first), frames_of(second))
    assert not same(frames_of(first), frames_of(demo.generate(PROMPT, num_steps=3, seed=8)))


def test_the_same_seed_gives_the_same_latents() -> None:
    pipeline = open_pipeline(None)
    first, second = (states_of(pipeline, Request(prompt=PROMPT, num_steps=3), [7]) for _ in range(2))

    assert len(first) == 4 and all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "fields", [{}, {"guidance_scale": 1}, {"num_frames": 1}, {"num_frames": 9, "width": 64}], ids=str
)
def test_dx_002_an_output_of_several_is_its_seed_s_own(
    engine: Engine, pipeline: WanPipeline, fields: dict[str, Any]
) -> None:
    several = engine.generate(PROMPT, seed=7, num_outputs=4, num_steps=4, **fields)
    assert [output.seed for output in several.outputs] == [7, 8, 9, 10]
    alone = engine.generate(PROMPT, seed=10, num_steps=4, **fields)
    difference = several.outputs[3].frames.astype(int) - alone.outputs[0].frames
    assert int(np.abs(difference).max()) <= 1
    assert not np.array_equal(several.outputs[2].frames, several.outputs[3].frames)

    request = Request(prompt=PROMPT, num_steps=4, **fields)
    together, single = states_of(pipeline, request, [7, 8, 9, 10]), states_of(pipeline, request, [10])
    assert torch.equal(together[0][3:], single[0])
    assert max(relative_error(a[3:], b) for a, b in zip(together, single, strict=True)) <= 1e-5


def test_seeds_go_on_from_zero_after_the_largest(engine: Engine) -> None:
    result = engine.generate(PROMPT, seed=LARGEST_SEED, num_outputs=2, num_steps=1)

    assert [output.seed for output in result.outputs] == [LARGEST_SEED, 0]
    assert same([result.outputs[1].frames], frames_of(engine.generate(PROMPT, seed=0, num_steps=1)))


def test_outputs_that_don_t_fit_one_batch_are_the_same(large: Path) -> None:
    engine, pipeline = Engine.from_pretrained(large, device="cpu"), open_pipeline(large)
    request = engine.resolve(Request(prompt=PROMPT, num_outputs=2, seed=3))
    assert [list(batch) for batch in pipeline.batches(request, [3, 4])] == [[3], [4]]

    found = engine.generate(request)

    for seed, output in zip([3, 4], found.outputs, strict=True):
        assert output.seed == seed
        assert same([output.frames], frames_of(engine.generate(PROMPT, seed=seed)))


# Sizes and frames


@pytest.mark.parametrize(
    ("num_frames", "nearest"),
    [
        (0, None),
        (-1, None),
        (1, "ok"),
        (2, "the nearest is 1 (or 5)"),
        (3, "the nearest is 1 (or 5)"),
        (4, "the nearest is 5 (or 1)"),
        (5, "ok"),
        (15, "the nearest is 13 (or 17)"),
        (16, "the nearest is 17 (or 13)"),
        (17, "ok"),
        (33, "ok"),
        (81, "ok"),
        (4093, "ok"),
        (4097, "the nearest is 4093"),
        (10**9, "the nearest is 4093"),
    ],
)
def test_dx_026_frame_counts_are_taken_or_refused_with_the_nearest(
    demo: Engine, num_frames: int, nearest: str | None
) -> None:
    if nearest == "ok":
        assert demo.resolve(Request(prompt=PROMPT, num_frames=num_frames)).num_frames == num_frames
        return
    with pytest.raises(RequestError) as caught:
        demo.generate(PROMPT, num_frames=num_frames)
    assert caught.value.message.startswith(f"num_frames is {num_frames}; ")
    assert (nearest or "it must be a whole number of at least 1") in caught.value.message
    assert caught.value.details["fields"] == ["num_frames"]


@pytest.mark.parametrize("num_frames", [1, 5, 13])
def test_dx_026_as_many_frames_come_out_as_were_asked(engine: Engine, num_frames: int) -> None:
    (output,) = engine.generate(PROMPT, num_frames=num_frames, num_steps=1).outputs

    assert output.num_frames == len(output.frames) == num_frames


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ({"width": 60}, ["width is 60; this model needs a multiple of 16, up to 16384: the nearest is 64 (or 48)"]),
        ({"width": 1}, ["the nearest is 16"]),
        ({"height": 100_000}, ["height is 100000; ", "the nearest is 16384"]),
        ({"height": 72, "width": 65}, ["height is 72; ", "64 (or 80)", "width is 65; "]),
        ({"height": 72, "num_frames": 6}, ["height is 72; ", "num_frames is 6; "]),
    ],
    ids=str,
)
def test_sizes_off_the_grid_are_refused_with_the_nearest(demo: Engine, size: dict[str, int], said: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        demo.generate(PROMPT, **size)

    assert [text for text in said if text not in caught.value.message] == []
    assert sorted(caught.value.details["fields"]) == sorted(size)


def test_a_size_that_the_model_was_not_trained_for_is_told(demo: Engine) -> None:
    result = demo.generate(PROMPT, width=80, height=64, num_frames=21, num_steps=1)

    assert [("80x64" in warning, "21" in warning) for warning in result.warnings] == [(True, False), (False, True)]
    assert demo.generate(PROMPT, num_steps=1).warnings == ()


# Attention


def preferences(engine: Engine, **attention: Any) -> dict[str, tuple[str | None, str | None]]:
    """Who preferred the backend of each kind of layer, or else the reason for it."""
    return {
        f"{layer.requirements.component}.{layer.requirements.role}": (
            layer.selection.preference.source if layer.selection.preference else None,
            layer.selection.reason,
        )
        for layer in engine.plan(Request(prompt=PROMPT, **attention)).layers
    }


def test_a_request_s_attention_is_nearer_than_the_engine_s(tiny: Path) -> None:
    engine = Engine.from_pretrained(tiny, device="cpu", attention={"transformer": "sdpa"})

    assert preferences(engine)["transformer.self"] == ("`attention` argument", None)
    assert preferences(engine)["vae.self"] == (None, "platform default")
    found = preferences(engine, attention={"transformer.self": "sdpa"})
    assert found["transformer.self"] == ("the request", None)
    assert found["transformer.cross"] == ("`attention` argument", None)
    assert preferences(engine, attention={"": "auto"})["transformer.self"] == (None, "platform default")
    assert preferences(engine)["transformer.self"] == ("`attention` argument", None)


def test_the_result_s_plan_is_the_request_s(engine: Engine) -> None:
    asked = engine.generate(PROMPT, attention={"transformer.cross": "sdpa"}, num_steps=1)

    assert asked.plan == engine.plan(asked.request) != engine.plan()
    assert asked.request.attention == {"transformer.cross": "sdpa"}
    assert Result.to_json(asked)["plan"]["layers"][2]["preference"]["source"] == "the request"


def test_settings_are_used_where_nothing_nearer_is_said(tiny: Path) -> None:
    settings = Settings.read(
        {"SAFELIGHT_MODEL": str(tiny), "SAFELIGHT_ATTENTION": "transformer=sdpa", "SAFELIGHT_DTYPE": "bfloat16"}
    )

    engine = Engine.from_pretrained(device="cpu", settings=settings)

    assert (engine.model, engine.dtype) == (str(tiny), "bfloat16")
    assert preferences(engine)["transformer.self"] == ("`SAFELIGHT_ATTENTION`", None)
    assert Engine.from_pretrained(device="cpu", dtype="float32", settings=settings).dtype == "float32"


@pytest.mark.parametrize("names", ["transfomer", "transformer.joint", "unet", "vae.cross"])
def test_a_component_that_isn_t_there_is_refused_with_those_that_are(engine: Engine, tiny: Path, names: str) -> None:
    def refusal(work: Callable[[], object]) -> str:
        with pytest.raises(RequestError) as caught:
            work()
        return caught.value.message

    there = "text_encoder, text_encoder.self, transformer, transformer.cross, transformer.self, vae, vae.self"
    by_request = refusal(lambda: engine.generate(PROMPT, attention={names: "sdpa"}))
    by_engine = refusal(lambda: Engine.from_pretrained(tiny, device="cpu", attention={names: "sdpa"}))
    assert names in by_request and there in by_request and "the request" in by_request
    assert names in by_engine and there in by_engine and "`attention` argument" in by_engine


@pytest.mark.parametrize("attention", ["sdap", {"transformer.self": "no_such_kernel"}, {"": "sdap"}], ids=str)
def test_a_backend_that_isn_t_there_stops_before_any_weight_is_read(tiny: Path, tmp_path: Path, attention: Any) -> None:
    events: list[Progress] = []

    with pytest.raises(SelectionError, match="no backend has this name") as caught:
        Engine.from_pretrained(tiny, device="cpu", attention=attention, report=events.append)

    assert "sdpa" in caught.value.message and events == []


def test_a_request_s_unknown_backend_is_refused_before_it_starts(engine: Engine) -> None:
    events: list[Progress] = []

    with pytest.raises(SelectionError, match="no_such_kernel"):
        engine.generate(PROMPT, attention={"transformer": "no_such_kernel"}, report=events.append)

    assert events == []


def test_dx_107_what_shouldn_t_change_the_picture_doesn_t(tiny: Path, engine: Engine) -> None:
    fields: dict[str, Any] = {"seed": 7, "num_steps": 2}
    plain = frames_of(engine.generate(PROMPT, **fields))
    named = Engine.from_pretrained(tiny, device="cpu", attention="sdpa", dtype="float32")

    assert same(frames_of(named.generate(PROMPT, **fields)), plain)
    assert same(frames_of(engine.generate(PROMPT, attention="native", **fields)), plain)
    assert same(frames_of(engine.generate(PROMPT, report=lambda event: None, **fields)), plain)
    assert same(frames_of(engine.generate(PROMPT, cancel=CancelToken(), fps=30, **fields)), plain)
    assert same(frames_of(engine.generate([Request(prompt=PROMPT, **fields)])[0]), plain)


# Several requests, several engines


def test_a_list_of_requests_gives_a_list_of_results(engine: Engine) -> None:
    requests = [Request(prompt="red", seed=1), Request(prompt="blue", seed=2, num_frames=1, num_outputs=2)]

    results = engine.generate(requests, num_steps=1)

    assert [result.request.prompt for result in results] == ["red", "blue"]
    assert [len(result.outputs) for result in results] == [1, 2]
    for request, result in zip(requests, results, strict=True):
        assert same(frames_of(result), frames_of(engine.generate(request, num_steps=1)))


def test_a_list_with_one_bad_request_starts_none(engine: Engine) -> None:
    events: list[Progress] = []

    with pytest.raises(RequestError, match="num_frames is 6"):
        engine.generate([Request(prompt="red"), Request(prompt="red", num_frames=6)], report=events.append)

    assert events == []


def test_requests_from_several_threads_don_t_mix(engine: Engine) -> None:
    prompts = ["red", "a blue square", "green triangle"]
    expected = {prompt: frames_of(engine.generate(prompt, seed=1)) for prompt in prompts}
    found: dict[str, list[NDArray[np.uint8]]] = {}

    def work(prompt: str, attention: str) -> None:
        found[prompt] = frames_of(engine.generate(prompt, seed=1, attention={attention: "sdpa"}))

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(prompts, ("transformer", "vae", ""), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(same(found[prompt], expected[prompt]) for prompt in prompts)


def test_two_engines_don_t_influence_each_other(tiny: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", seed=8, num_layers=1)
    first = Engine.from_pretrained(tiny, device="cpu")
    before, plan = frames_of(first.generate(PROMPT, seed=1)), first.plan()

    second = Engine.from_pretrained(other, device="cpu", attention={"transformer.self": "sdpa"})
    theirs = frames_of(second.generate(PROMPT, seed=1))

    assert same(frames_of(first.generate(PROMPT, seed=1)), before) and not same(theirs, before)
    assert first.plan() == plan != second.plan()
    assert same(frames_of(second.generate(PROMPT, seed=1)), theirs)
    assert same(frames_of(Engine.from_pretrained(tiny, device="cpu").generate(PROMPT, seed=1)), before)


@pytest.mark.parametrize("request_", [None, b"a cat", 7, ["a cat"], [Request(prompt=PROMPT), None]], ids=str)
def test_what_is_no_request_is_refused(engine: Engine, request_: Any) -> None:
    with pytest.raises(RequestError, match="must be a"):
        engine.generate(request_)


def test_a_field_that_a_request_does_not_have_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="a request has no steps; its fields are prompt, negative_prompt"):
        engine.generate(PROMPT, steps=3)


# On the way


def test_progress_adds_up(large: Path) -> None:
    loading: list[Progress] = []
    engine = Engine.from_pretrained(large, device="cpu", report=loading.append)
    events: list[Progress] = []
    engine.generate(PROMPT, num_outputs=3, report=events.append)

    assert [(event.stage, event.step, event.num_steps) for event in loading] == [("load", i, 3) for i in (1, 2, 3)]
    stages = {stage: list(group) for stage, group in itertools.groupby(events, lambda event: event.stage)}
    assert list(stages) == ["encode", "denoise", "decode"]
    for group in stages.values():
        steps = [event.step for event in group]
        assert steps[0] == 0 and steps == sorted(set(steps)) and steps[-1] == group[-1].num_steps
        elapsed = [event.elapsed_s for event in group]
        assert elapsed == sorted(elapsed)
        assert group[0].remaining_s is None and group[-1].remaining_s == 0
    assert [event.step for event in stages["denoise"]] == list(range(7))  # three batches of two steps
    assert {event.num_steps for event in stages["denoise"]} == {6}
    assert [event.step for event in stages["decode"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
def test_a_cancelled_request_stops_within_a_step(engine: Engine, stage: str) -> None:
    token = CancelToken()
    events: list[Progress] = []

    def report(event: Progress) -> None:
        events.append(event)
        if event.stage == stage and (event.step == 1 or event.num_steps == 1 or stage == "decode"):
            token.cancel()

    with pytest.raises(Cancelled):
        engine.generate(PROMPT, num_steps=9, num_outputs=2, cancel=token, report=report)

    told = [event.step for event in events if event.stage == "denoise"]
    assert told == {"encode": [0], "denoise": [0, 1], "decode": list(range(10))}[stage]
    assert [event.stage for event in events].count("decode") == (stage == "decode")
    assert engine.generate(PROMPT, num_steps=1).outputs


def test_a_request_that_is_cancelled_before_it_starts_does_nothing(engine: Engine) -> None:
    token = CancelToken()
    token.cancel()
    events: list[Progress] = []

    with pytest.raises(Cancelled):
        engine.generate(PROMPT, cancel=token, report=events.append)

    assert events == []
