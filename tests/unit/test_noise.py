"""The noise a run starts from is the seed's alone, and a prompt that is too long says so."""

from collections.abc import Iterator

import pytest
import torch

from safelight.engine import Engine
from safelight.request import Request
from safelight.sampling.noise import draw_noise

PIPELINE_SHAPE = (12, 3, 8, 8)


@pytest.fixture
def float64_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def first_latents(engine: Engine, **fields: object) -> torch.Tensor:
    """The state before the first step, as the pipeline has it."""
    request = engine.resolve(Request(prompt="a red circle", num_steps=1, seed=5, **fields))  # type: ignore[arg-type]
    pipeline = engine._pipeline
    assert pipeline is not None
    engine._bind(engine._load_plan(request))
    with torch.inference_mode():
        text, _ = pipeline.encode(request)
        return next(iter(pipeline.denoise(request, text, [5]))).latents


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dx_025_the_model_s_dtype_does_not_change_the_noise(dtype: str) -> None:
    latents = first_latents(Engine.from_pretrained(device="cpu", dtype=dtype))
    assert latents.dtype == torch.float32
    assert torch.equal(latents, draw_noise([5], PIPELINE_SHAPE))


def test_dx_025_torch_s_default_dtype_does_not_change_the_noise(float64_default: None) -> None:
    noise = draw_noise([5], PIPELINE_SHAPE)
    assert noise.dtype == torch.float32
    expected = torch.randn((1, *PIPELINE_SHAPE), generator=torch.Generator().manual_seed(5), dtype=torch.float32)
    assert torch.equal(noise, expected)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_dx_025_company_does_not_change_the_noise(num_outputs: int) -> None:
    together = draw_noise([5 + i for i in range(num_outputs)], PIPELINE_SHAPE)
    assert torch.equal(together[:1], draw_noise([5], PIPELINE_SHAPE))


def test_dx_065_a_prompt_beyond_the_limit_is_cut_with_a_notice_that_says_how_much() -> None:
    engine = Engine.from_pretrained(device="cpu")
    fits = "red " * 511  # and the end token
    for prompt, expected in ((fits, ()), (fits + "circle", ("the prompt has 1 tokens more",))):
        warnings = engine.generate(prompt, num_steps=1, guidance_scale=1, num_frames=1).warnings
        assert len(warnings) == len(expected)
        assert all(text in warning for text, warning in zip(expected, warnings, strict=True))


def test_dx_065_the_last_word_counts_up_to_the_limit_and_not_beyond() -> None:
    engine = Engine.from_pretrained(device="cpu")

    def frames(prompt: str) -> bytes:
        result = engine.generate(prompt, num_steps=2, guidance_scale=1, num_frames=1, seed=3)
        return result.outputs[0].frames.tobytes()

    assert frames("red " * 510 + "circle") != frames("red " * 510 + "square")
    assert frames("red " * 511 + "circle") == frames("red " * 511 + "square")
