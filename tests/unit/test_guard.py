"""The first-use guard: right kernels pass in the demo, wrong ones stop the run with numbers."""

import pytest
import torch

from safelight import Engine
from safelight.attention import AttentionRequirements, declared_backends
from safelight.attention.cases import cases
from safelight.attention.contract import inputs
from safelight.attention.guard import Guard
from safelight.errors import KernelMismatchError, RequestError

SDPA = declared_backends()["sdpa"]
REQUEST = {"width": 64, "height": 64, "num_frames": 5, "num_steps": 2, "seed": 7}
NEED = AttentionRequirements(head_dim=64, dtype="float32", num_heads=2, num_kv_heads=2, equal_lengths=True)


def guarded(kernel, need=NEED, mode="first", **sizes):
    return Guard(mode, **sizes).around(kernel, SDPA, need, "transformer.blocks.0.attn1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_kernels_pass_in_the_demo_and_the_result_says_so(dtype) -> None:
    engine = Engine.from_pretrained(device="cpu", dtype=dtype, check_attention="always")
    checks = engine.generate("a red circle moving right", **REQUEST).to_json()["attention_checks"]
    found = {(check["component"], check["role"]): check for check in checks}
    assert {("transformer", "self"), ("transformer", "cross")} <= set(found)
    assert all(check["backend"] == "sdpa" and check["error"] < check["allowed"] for check in checks)
    assert found["transformer", "self"]["calls"] > 5


def test_off_is_the_default_and_costs_no_wrapper() -> None:
    engine = Engine.from_pretrained(device="cpu")
    assert "attention_checks" not in engine.generate("a red circle", **REQUEST).to_json()


def test_a_wrong_word_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(RequestError, match="off, first, always"):
        Engine.from_pretrained(device="cpu", check_attention="sometimes")


@pytest.mark.parametrize("case", cases(SDPA, ("float32", "bfloat16")), ids=lambda case: case.name)
def test_right_kernels_pass_on_every_case(case) -> None:
    need = case.requirements
    if (need.packed_varlen and need.mask != "none") or case.halves:
        return
    given = inputs(case)
    kernel = guarded(SDPA.load(need), need, score_bytes=40_000, most_rows=50)
    kernel(given.q, given.k, given.v, scale=need.scale, causal=need.causal, mask=given.mask, layout=given.layout)


def scaled(factor):
    def wrong(q, k, v, *, scale=None, **options):
        return SDPA.load(NEED)(q, k, v, scale=factor * (q.shape[-1] ** -0.5 if scale is None else scale), **options)

    return wrong


def test_a_scale_that_is_off_by_5_percent_stops_with_numbers() -> None:
    q, k, v = torch.randn(3, 1, 300, 2, 64).unbind(0)
    with pytest.raises(KernelMismatchError, match=r"blocks\.0\.attn1: .* is off by .* where .* is allowed") as caught:
        guarded(scaled(1.05))(q, k, v)
    details = caught.value.details
    assert details["error"] > details["allowed"] and details["backend"] == "sdpa"
    assert {"batch", "row", "head"} <= set(details)


def without_mask(q, k, v, *, mask, **options):
    return SDPA.load(NEED)(q, k, v, **options)


def test_a_dropped_mask_stops() -> None:
    need = NEED.replace(mask="key_padding")
    q, k, v = torch.randn(3, 2, 100, 2, 64).unbind(0)
    mask = torch.arange(100) < torch.tensor([[100], [90]])
    with pytest.raises(KernelMismatchError, match="batch 1"):
        guarded(without_mask, need)(q, k, v, mask=mask)


def test_nan_stops() -> None:
    q, k, v = torch.randn(3, 1, 10, 2, 64).unbind(0)
    with pytest.raises(KernelMismatchError, match="NaN"):
        guarded(lambda *qkv, **options: SDPA.load(NEED)(*qkv) * torch.nan)(q, k, v)


@pytest.mark.parametrize(("mode", "stops"), [("first", False), ("always", True)])
def test_first_looks_once_and_always_every_time(mode, stops) -> None:
    calls = []

    def wrong_later(q, k, v, **options):
        calls.append(1)
        return SDPA.load(NEED)(q, k, v) * (1 if len(calls) == 1 else 2)

    kernel = guarded(wrong_later, mode=mode)
    q, k, v = torch.randn(3, 1, 10, 2, 64).unbind(0)
    kernel(q, k, v)
    if stops:
        with pytest.raises(KernelMismatchError):
            kernel(q, k, v)
    else:
        kernel(q, k, v)
    assert len(calls) == 2
