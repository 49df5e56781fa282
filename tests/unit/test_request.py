"""What crosses the engine's border: which requests are refused, and that everything survives JSON."""

import dataclasses
import json
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safelight.attention import AttentionRequirements, LayerGroup, build_plan, declared_backends
from safelight.errors import Cancelled, OutputError, RequestError
from safelight.platforms import load_machine
from safelight.request import SEED_LIMIT, CancelToken, Output, Progress, Request, Result, parse_fps

PROMPT = "a red circle moving right"


def problem_with(**fields):
    """The message that refuses these fields."""
    with pytest.raises(RequestError) as caught:
        Request(**{"prompt": PROMPT, **fields})
    assert caught.value.exit_status == 2
    return caught.value.message


# Field by field


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, None])
def test_dx_062_a_seed_in_range_is_kept_to_the_last_digit(seed) -> None:
    request = Request(prompt=PROMPT, seed=seed)
    again = Request.from_json(json.loads(json.dumps(request.to_json())))
    assert again.seed == request.seed == seed
    assert type(again.seed) is type(seed)


@pytest.mark.parametrize(
    "seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**64, "7", "", 1.0, 1.5, float("nan"), float("inf"), True, False, [7]]
)
def test_dx_062_any_other_seed_is_refused(seed) -> None:
    expected = f"seed is {seed!r}; it must be a whole number from 0 to 9223372036854775807"
    assert problem_with(seed=seed) == expected
    data = json.loads(json.dumps({"prompt": PROMPT, "seed": seed}))
    with pytest.raises(RequestError, match=r"^seed is "):
        Request.from_json(data)


@pytest.mark.parametrize("field", ["width", "height", "num_frames", "num_steps", "num_outputs"])
@pytest.mark.parametrize("value", [0, -1, -(2**63), "8", 8.0, 8.5, True, float("nan"), [8]])
def test_sizes_and_counts_are_whole_numbers_above_zero(field, value) -> None:
    assert problem_with(**{field: value}).startswith(f"{field} is {value!r}; it must be a whole number ")
    assert getattr(Request(**{"prompt": PROMPT, field: 1}), field) == 1


def test_steps_have_an_end() -> None:
    assert problem_with(num_steps=10_001) == "num_steps is 10001; it must be a whole number from 1 to 10000"
    assert Request(prompt=PROMPT, num_steps=10_000).num_steps == 10_000


@pytest.mark.parametrize("guidance", [0, 0.0, 0.5, 1, 1.0001, 5, 7.5, 1000])
def test_guidance_is_kept_as_given(guidance) -> None:
    assert Request(prompt=PROMPT, guidance_scale=guidance).guidance_scale == guidance


@pytest.mark.parametrize(
    "guidance", [float("nan"), float("inf"), -float("inf"), -1, -1e-9, 1000.5, 10**400, "5", True, [5]]
)
def test_any_other_guidance_is_refused(guidance) -> None:
    expected = f"guidance_scale is {guidance!r}; it must be a number from 0 to 1000"
    assert problem_with(guidance_scale=guidance) == expected


@pytest.mark.parametrize("prompt", ["", " ", "\t\n \u3000"])
def test_a_prompt_that_says_nothing_is_refused(prompt) -> None:
    assert problem_with(prompt=prompt) == "prompt is empty; say what to generate"


@pytest.mark.parametrize("prompt", ["🔴➡️", "一个红色的圆", "x" * 10_000, " a\nb "])
def test_any_other_prompt_is_kept_as_given(prompt) -> None:
    request = Request(prompt=prompt, negative_prompt="")
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert (request.prompt, request.negative_prompt) == (prompt, "")


@pytest.mark.parametrize("value", [7, b"a", ["a cat"]])
def test_prompts_are_text(value) -> None:
    assert problem_with(prompt=value) == f"prompt is {value!r}; it must be text"
    assert problem_with(negative_prompt=value) == f"negative_prompt is {value!r}; it must be text"


@pytest.mark.parametrize("value", ["sdpa", ["sdpa"], {"transformer": 1}, {1: "sdpa"}, {"transformer": None}])
def test_attention_maps_names_to_backends(value) -> None:
    assert problem_with(attention=value).startswith(f"attention is {value!r}; it must map names to backends")


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        Request(prompt="", width=-8, seed=1.5, guidance_scale=float("nan"))
    assert caught.value.message.split("; ") == [
        "prompt is empty",
        "say what to generate",
        "width is -8",
        "it must be a whole number of at least 1",
        "seed is 1.5",
        "it must be a whole number from 0 to 9223372036854775807",
        "guidance_scale is nan",
        "it must be a number from 0 to 1000",
    ]
    assert caught.value.details["fields"] == ["prompt", "width", "seed", "guidance_scale"]


def test_none_is_left_to_the_model_and_zero_is_zero() -> None:
    request = Request(prompt=PROMPT, guidance_scale=0, seed=0)
    assert (request.guidance_scale, request.seed) == (0, 0)
    left = ("negative_prompt", "width", "height", "num_frames", "fps", "num_steps")
    assert [getattr(request, name) for name in left] == [None] * len(left)
    assert problem_with(num_outputs=None).startswith("num_outputs is None")


def test_replacing_a_field_checks_it_and_leaves_the_original() -> None:
    request = Request(prompt=PROMPT, seed=7)
    assert request.replace(seed=8).seed == 8 and request.seed == 7
    with pytest.raises(RequestError):
        request.replace(seed=-1)


# Frame rates


@pytest.mark.parametrize(
    ("text", "fps"),
    [
        ("1", Fraction(1)),
        (8, Fraction(8)),
        ("16", Fraction(16)),
        ("23.976", Fraction(2997, 125)),
        (23.976, Fraction(2997, 125)),
        ("24000/1001", Fraction(24000, 1001)),
        (Fraction(24000, 1001), Fraction(24000, 1001)),
        (" 30 ", Fraction(30)),
        ("0.5", Fraction(1, 2)),
        (1000, Fraction(1000)),
    ],
)
def test_dx_059_a_frame_rate_is_kept_as_a_rational(text, fps) -> None:
    assert parse_fps(text) == fps
    request = Request(prompt=PROMPT, fps=fps)
    data = json.loads(json.dumps(request.to_json()))
    assert data["fps"] == str(fps)
    assert Request.from_json(data).fps == fps


@pytest.mark.parametrize("text", [0, "0", "0/5", -5, "-5", "-24000/1001", 1001, "1000.001", "9" * 40])
def test_dx_059_a_rate_that_no_video_has_is_refused(text) -> None:
    with pytest.raises(RequestError, match="it must be above 0 and at most 1000") as caught:
        parse_fps(text)
    assert caught.value.details["fields"] == ["fps"]


@pytest.mark.parametrize(
    "text",
    ["x", "", "24/0", "0/0", "1/2/3", "nan", "inf", float("nan"), float("inf"), True, "1e3", "1e999999999", "1_6"],
)
def test_dx_059_what_is_no_number_is_refused(text) -> None:
    with pytest.raises(RequestError, match=r"give a number such as 16, 23.976 or 24000/1001"):
        parse_fps(text)
    with pytest.raises(RequestError, match=r"^fps is "):
        Request.from_json({"prompt": PROMPT, "fps": text})


@pytest.mark.parametrize(
    ("fps", "shown"),
    [(Fraction(0), "0"), (Fraction(-1, 2), "-1/2"), (Fraction(1001), "1001"), (16, "16"), ("16", "'16'")],
)
def test_a_request_takes_a_positive_fraction(fps, shown) -> None:
    assert problem_with(fps=fps) == f"fps is {shown}; it must be a Fraction above 0 and at most 1000"


# JSON


def test_the_json_of_a_request_has_every_field_but_the_cancel_token() -> None:
    request = Request(
        prompt=PROMPT,
        negative_prompt="blurry",
        width=64,
        height=48,
        num_frames=17,
        fps=Fraction(24000, 1001),
        num_steps=20,
        guidance_scale=3.5,
        seed=2**53 + 1,
        num_outputs=4,
        attention={"": "auto", "transformer.self": "sdpa"},
        cancel=CancelToken(),
    )
    data = json.loads(json.dumps(request.to_json()))
    assert data == {
        "prompt": PROMPT,
        "negative_prompt": "blurry",
        "width": 64,
        "height": 48,
        "num_frames": 17,
        "fps": "24000/1001",
        "num_steps": 20,
        "guidance_scale": 3.5,
        "guidance_scale_2": None,
        "seed": 9007199254740993,
        "num_outputs": 4,
        "attention": {"": "auto", "transformer.self": "sdpa"},
    }
    assert Request.from_json(data) == request


NUMBER = st.none() | st.integers(1, 4096)


@settings(max_examples=200)
@given(
    st.builds(
        Request,
        prompt=st.text(min_size=1).filter(str.strip),
        negative_prompt=st.none() | st.text(),
        width=NUMBER,
        height=NUMBER,
        num_frames=NUMBER,
        fps=st.none() | st.fractions("0.001", 1000, max_denominator=10**6),
        num_steps=NUMBER,
        guidance_scale=st.none() | st.floats(0, 1000),
        seed=st.none() | st.integers(0, SEED_LIMIT - 1),
        num_outputs=st.integers(1, 100),
        attention=st.dictionaries(st.sampled_from(("", "transformer", "vae.self")), st.text(min_size=1, max_size=5)),
    )
)
def test_a_request_round_trips_through_json(request_) -> None:
    assert Request.from_json(json.loads(json.dumps(request_.to_json()))) == request_


def test_null_is_the_same_as_left_out() -> None:
    names = [name for name in Request(prompt=PROMPT).to_json() if name != "prompt"]
    assert Request.from_json({"prompt": PROMPT, **dict.fromkeys(names)}) == Request(prompt=PROMPT)


def test_an_unknown_field_is_refused_with_the_fields_there_are() -> None:
    with pytest.raises(RequestError) as caught:
        Request.from_json({"prompt": PROMPT, "steps": 4, "cancel": None})
    assert caught.value.message.startswith("unknown request fields ['cancel', 'steps']; the fields are ['attention', ")
    assert "num_steps" in caught.value.message
    assert caught.value.details["fields"] == ["cancel", "steps"]


@pytest.mark.parametrize("data", [{}, {"seed": 7}, {"prompt": None}])
def test_a_request_without_a_prompt_is_refused(data) -> None:
    with pytest.raises(RequestError, match=r"^prompt is missing; say what to generate$"):
        Request.from_json(data)


@pytest.mark.parametrize("data", [None, [], "a cat", 7])
def test_what_is_no_object_is_refused(data) -> None:
    with pytest.raises(RequestError, match=r"^a request is a JSON object, not "):
        Request.from_json(data)


@pytest.mark.parametrize("remaining_s", [None, 3.25])
def test_progress_round_trips_through_json(remaining_s) -> None:
    progress = Progress(stage="denoise", step=3, num_steps=20, elapsed_s=0.5, remaining_s=remaining_s)
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_a_progress_has_the_fields_of_a_bar() -> None:
    assert Progress(stage="load", step=0, num_steps=3, elapsed_s=0.0).to_json() == {
        "stage": "load",
        "step": 0,
        "num_steps": 3,
        "elapsed_s": 0.0,
        "remaining_s": None,
    }


# Results


def result_of(*outputs):
    need = AttentionRequirements(head_dim=64, dtype="float32", num_heads=4, num_kv_heads=4)
    plan = build_plan([LayerGroup(requirements=need, count=6)], load_machine("cpu-avx2"), (), declared_backends())
    request = Request(prompt=PROMPT, width=64, height=48, num_frames=5, fps=Fraction(24000, 1001), seed=2**63 - 1)
    return Result(
        outputs=outputs,
        plan=plan,
        request=request,
        model="demo",
        timings_s={"encode": 0.25, "denoise": 1.5, "decode": 0.5},
        warnings=("the prompt has 3 tokens more than the model's 512; they were cut",),
    )


def output(seed, path=None):
    frames = np.zeros((5, 48, 64, 3), np.uint8)
    made = Output.from_frames(frames, seed=seed, fps=Fraction(24000, 1001))
    return dataclasses.replace(made, path=path)


def test_an_output_knows_its_size() -> None:
    made = output(7)
    assert (made.num_frames, made.height, made.width) == (5, 48, 64)


def test_a_result_comes_back_from_json_without_its_pixels() -> None:
    result = result_of(output(2**63 - 1, Path("circle-0.mp4")), output(0))
    back = Result.from_json(json.loads(json.dumps(result.to_json())))
    assert back == result
    assert back.outputs[0].fps == Fraction(24000, 1001)
    assert Request.from_json(back.to_json()["request"]) == result.request
    with pytest.raises(OutputError, match=r"holds no pixels; read them from circle-0\.mp4"):
        _ = back.outputs[0].frames
    with pytest.raises(OutputError, match="it was never saved"):
        _ = back.outputs[1].frames


def test_an_output_s_frame_rate_alone_comes_back_as_its_number() -> None:
    data = {**output(3).to_json(), "fps": 12.5}
    assert Output.from_json(data).fps == Fraction(25, 2)


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_half_a_character_is_refused(field) -> None:
    with pytest.raises(RequestError) as caught:
        Request(**{"prompt": PROMPT, field: "a \ud83d cat"})
    assert caught.value.details["fields"] == [field]
    assert caught.value.message.startswith(f"{field} holds half of a character")


def test_the_public_json_of_a_result() -> None:
    result = result_of(output(2**63 - 1, Path("circle-0.mp4")), output(0))
    data = json.loads(json.dumps(result.to_json()))
    assert list(data) == ["outputs", "plan", "request", "timings_s", "warnings", "model"]
    assert data["outputs"] == [
        {
            "path": "circle-0.mp4",
            "seed": 2**63 - 1,
            "width": 64,
            "height": 48,
            "num_frames": 5,
            "fps": 24000 / 1001,
        },
        {"path": None, "seed": 0, "width": 64, "height": 48, "num_frames": 5, "fps": 24000 / 1001},
    ]
    assert data["plan"] == result.plan.to_json()
    assert data["plan"]["layers"][0]["backend"] == "sdpa"
    assert data["model"] == "demo"
    assert data["request"] == result.request.to_json()
    assert data["timings_s"] == {"encode": 0.25, "denoise": 1.5, "decode": 0.5}
    assert data["warnings"] == ["the prompt has 3 tokens more than the model's 512; they were cut"]


def test_the_request_of_a_result_makes_it_again() -> None:
    data = json.loads(json.dumps(result_of(output(7)).to_json()))["request"]
    assert Request.from_json(data) == result_of().request


# Cancelling


def test_a_token_is_set_from_any_thread() -> None:
    token = CancelToken()
    token.raise_if_cancelled()
    assert not token.is_cancelled
    thread = threading.Thread(target=token.cancel)
    thread.start()
    thread.join()
    assert token.is_cancelled
    with pytest.raises(Cancelled) as caught:
        token.raise_if_cancelled()
    assert caught.value.exit_status == 130


def test_a_token_is_no_part_of_what_was_asked() -> None:
    assert Request(prompt=PROMPT, cancel=CancelToken()) == Request(prompt=PROMPT)
