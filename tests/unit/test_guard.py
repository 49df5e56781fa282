"""The first-use guard: right kernels pass in the demo, wrong ones stop the run with numbers."""

import dataclasses
import logging
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from safelight import Engine
from safelight.attention import AttentionRequirements, Layout, declared_backends
from safelight.attention.cases import cases
from safelight.attention.contract import inputs
from safelight.attention.guard import Guard
from safelight.errors import KernelMismatchError, RequestError
from safelight.request import Result
from tests.unit.site_packages import install

SDPA = declared_backends()["sdpa"]
REQUEST = {"width": 64, "height": 64, "num_frames": 5, "num_steps": 2, "seed": 7}
NEED = AttentionRequirements(head_dim=64, dtype="float32", num_heads=2, num_kv_heads=2, equal_lengths=True)


def guarded(kernel, need=NEED, mode="first", **sizes):
    return Guard(mode, **sizes).around(kernel, SDPA, need, "transformer.blocks.0.attn1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_kernels_pass_in_the_demo_and_the_result_says_so(dtype) -> None:
    engine = Engine.from_pretrained(device="cpu", dtype=dtype, check_attention="always")
    document = engine.generate("a red circle moving right", **REQUEST).to_json()
    checks = document["attention_checks"]
    assert [
        check.to_json() for check in Result.from_json({**document, "attention_checks": checks}).attention_checks
    ] == checks
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


# Halves are two calls, and a mask on packed documents is refused.
CASES = [
    case
    for case in cases(SDPA, ("float32", "bfloat16"))
    if not case.halves and not (case.requirements.packed_varlen and case.mask)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_kernels_pass_on_every_case(case) -> None:
    need = case.requirements
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


# Activations have any size: what is right or wrong about a kernel doesn't change with it.


@pytest.mark.parametrize("size", [1e-3, 1, 1e3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("factor", "stops"), [(1, False), (1.05, True), (0.95, True)])
def test_a_scale_is_found_out_whatever_the_size_of_the_values(size, dtype, factor, stops) -> None:
    q, k, v = torch.randn(3, 2, 700, 2, 64, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    kernel = guarded(scaled(factor), NEED.replace(dtype=dtype))
    if stops:
        with pytest.raises(KernelMismatchError):
            kernel(q, k, v * size)
    else:
        kernel(q, k, v * size)


@pytest.mark.parametrize("common", [0, 30])
def test_values_that_all_lie_on_one_side_are_no_error(common) -> None:
    """Their rounding is larger than what they have of their own, and so is the output."""
    q, k, v = torch.randn(3, 1, 500, 2, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    guarded(SDPA.load(NEED), NEED.replace(dtype="bfloat16"))(q, k, v + common)


def with_a_wrong_row(row, factor):
    def wrong(q, k, v, **options):
        out = SDPA.load(NEED)(q, k, v, **options)
        out[1, row, 1] *= factor
        return out

    return wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [0, 0.7])
def test_one_row_that_was_never_written_or_misses_a_part_is_named(dtype, factor) -> None:
    q, k, v = torch.randn(3, 2, 900, 2, 64, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    with pytest.raises(KernelMismatchError, match=r"\(batch 1, row 421, head 1\)") as caught:
        guarded(with_a_wrong_row(421, factor), NEED.replace(dtype=dtype))(q, k, v)
    assert (caught.value.details["batch"], caught.value.details["row"], caught.value.details["head"]) == (1, 421, 1)


def test_of_a_long_sequence_the_last_row_is_looked_at() -> None:
    q, k, v = torch.randn(3, 2, 900, 2, 64, generator=torch.Generator().manual_seed(4))
    with pytest.raises(KernelMismatchError, match="row 899"):
        guarded(with_a_wrong_row(899, 0), most_rows=20)(q, k, v)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor):
                self.bytes = max(self.bytes, min(made.nbytes, made.untyped_storage().nbytes()))
        return result


def test_the_memory_of_a_long_comparison_is_bounded() -> None:
    q, k, v = torch.zeros(3, 1, 5000, 8, 16)
    kernel = guarded(lambda q, k, v, **options: torch.zeros_like(q), NEED.replace(num_heads=8, num_kv_heads=8))
    bounded = guarded(
        lambda q, k, v, **options: torch.zeros_like(q),
        NEED.replace(num_heads=8, num_kv_heads=8),
        score_bytes=10 * 5000 * 4,
    )
    with Largest() as all_rows:
        kernel(q, k, v)
    with Largest() as few_rows:
        bounded(q, k, v)
    # The largest that is left is the output itself.
    assert few_rows.bytes == q.nbytes < all_rows.bytes <= 64 * 2**20


def test_a_kernel_that_changes_its_inputs_is_not_compared_with_itself() -> None:
    def spoils(q, k, v, **options):
        return SDPA.load(NEED)(q, k.mul_(0.5), v, **options)

    q, k, v = torch.randn(3, 1, 50, 2, 64)
    with pytest.raises(KernelMismatchError):
        guarded(spoils)(q, k, v)


def test_a_call_with_one_key_settles_nothing() -> None:
    """With one key every scale gives the same."""
    kernel = guarded(scaled(3))
    q, k, v = torch.randn(3, 1, 50, 2, 64)
    kernel(q[:, :1], k[:, :1], v[:, :1])
    with pytest.raises(KernelMismatchError):
        kernel(q, k, v)


def test_documents_of_one_key_settle_nothing() -> None:
    need = NEED.replace(packed_varlen=True)
    kernel = guarded(lambda *qkv, scale=None, **options: SDPA.load(need)(*qkv, scale=3.0, **options), need)
    q, k, v = torch.randn(3, 1, 8, 2, 64)
    kernel(q, k[:, :2], v[:, :2], layout=Layout.of_documents((5, 3), (1, 1)))
    with pytest.raises(KernelMismatchError):
        kernel(q, k, v, layout=Layout.of_documents((5, 3), (4, 4)))


def test_a_call_without_queries_is_no_error_and_settles_nothing() -> None:
    kernel = guarded(scaled(3))
    q, k, v = torch.randn(3, 1, 50, 2, 64)
    assert kernel(q[:, :0], k, v).shape == (1, 0, 2, 64)
    with pytest.raises(KernelMismatchError):
        kernel(q, k, v)


def test_a_layer_is_looked_at_again_when_it_first_is_causal() -> None:
    kernel = guarded(lambda q, k, v, causal=False, **options: SDPA.load(NEED)(q, k, v, **options))
    q, k, v = torch.randn(3, 1, 50, 2, 64)
    kernel(q, k, v)
    with pytest.raises(KernelMismatchError):
        kernel(q, k, v, causal=True)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out, lse: out, "it returned Tensor for a layer that needs out and LSE"),
        (lambda out, lse: (out, None), "it returned tuple for a layer that needs out and LSE"),
        (
            lambda out, lse: (out, lse.transpose(1, 2)),
            r"LSE is torch.float32 \[2, 50, 2\], it should be float32 \[2, 2",
        ),
        (lambda out, lse: (out, lse.double()), "LSE is torch.float64"),
        (lambda out, lse: (out, lse.mT.contiguous().mT), "LSE isn't contiguous"),
        (lambda out, lse: (out.transpose(1, 2), lse), r"out is torch.float32 \[2, 2, 50, 64\]"),
        (lambda out, lse: (out.bfloat16(), lse), "out is torch.bfloat16"),
    ],
)
def test_a_result_of_another_form_stops(spoil, said) -> None:
    need = NEED.replace(needs_lse=True)
    q, k, v = torch.randn(3, 2, 50, 2, 64)
    with pytest.raises(KernelMismatchError, match=said):
        guarded(lambda *qkv, **options: spoil(*SDPA.load(need)(*qkv, **options)), need)(q, k, v)


def test_a_layer_is_looked_at_again_when_it_first_gets_a_mask() -> None:
    kernel = guarded(lambda q, k, v, mask=None, **options: SDPA.load(NEED)(q, k, v, **options))
    q, k, v = torch.randn(3, 1, 50, 2, 64)
    kernel(q, k, v)
    with pytest.raises(KernelMismatchError):
        kernel(q, k, v, mask=torch.arange(50)[None] < 40)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_whose_ends_are_off_by_one_stop(causal) -> None:
    def off(q, k, v, *, layout, **options):
        lengths = [1001, 1700, 1299]
        return SDPA.load(NEED)(q, k, v, layout=Layout.of_documents(lengths), **options)

    need = NEED.replace(packed_varlen=True, causal=causal)
    q, k, v = torch.randn(3, 1, 4000, 2, 64)
    layout = Layout.of_documents([1000, 1700, 1300])
    guarded(SDPA.load(need), need, most_rows=30)(q, k, v, causal=causal, layout=layout)
    with pytest.raises(KernelMismatchError):
        guarded(off, need, most_rows=30)(q, k, v, causal=causal, layout=layout)


def test_an_lse_in_another_base_stops() -> None:
    need = NEED.replace(needs_lse=True)

    def base_2(*qkv, **options):
        out, lse = SDPA.load(need)(*qkv, **options)
        return out, lse * 1.4427

    q, k, v = torch.randn(3, 1, 50, 2, 64)
    guarded(SDPA.load(need), need)(q, k, v)
    with pytest.raises(KernelMismatchError, match="LSE is off by"):
        guarded(base_2, need)(q, k, v)


@pytest.mark.parametrize(("is_lossy", "loss", "stops"), [(False, 0.1, True), (True, 0.1, False), (True, 0.4, True)])
def test_a_lossy_kernel_has_a_wider_tolerance(is_lossy, loss, stops) -> None:
    backend = dataclasses.replace(SDPA, is_lossy=is_lossy)
    kernel = Guard("first").around(lambda *qkv, **o: SDPA.load(NEED)(*qkv, **o) * (1 + loss), backend, NEED, "layer")
    q, k, v = torch.randn(3, 1, 50, 2, 64)
    if stops:
        with pytest.raises(KernelMismatchError):
            kernel(q, k, v)
    else:
        kernel(q, k, v)


def test_a_sparse_kernel_is_left_alone_and_that_is_said_once(caplog) -> None:
    guard, kernel = Guard("always"), SDPA.load(NEED)
    sparse = dataclasses.replace(SDPA, name="sparse", is_sparse=True)
    with caplog.at_level(logging.INFO, logger="safelight.attention"):
        assert all(guard.around(kernel, sparse, NEED, f"layer {i}") is kernel for i in range(3))
    assert caplog.messages == ["transformer.self: sparse is sparse: dense attention is no measure for it, not checked"]


def test_inputs_that_are_no_numbers_are_no_fault_of_the_kernel() -> None:
    q, k, v = torch.randn(3, 1, 50, 2, 64)
    v[0, 3, 0, 0] = torch.inf
    guarded(SDPA.load(NEED))(q, k, v)


WRONG = """
import dataclasses
from safelight.attention.backends.sdpa import BACKEND as SDPA


def with_scale(requirements):
    kernel = SDPA.load(requirements)

    def wrong(q, k, v, *, scale=None, **options):
        return kernel(q, k, v, scale=1.05 * (q.shape[-1] ** -0.5 if scale is None else scale), **options)

    return wrong


def without_mask(requirements):
    kernel = SDPA.load(requirements)
    return lambda q, k, v, *, mask=None, **options: kernel(q, k, v, **options)


SCALE = dataclasses.replace(SDPA, name="scale", aliases=(), load=with_scale)
MASK = dataclasses.replace(SDPA, name="mask", aliases=(), load=without_mask)
"""


@pytest.fixture
def wrong_kernels(tmp_path, monkeypatch):
    points = "[safelight.backends]\nscale = wrong_kernels:SCALE\nmask = wrong_kernels:MASK\n"
    install(tmp_path, "wrong-kernels", files={"wrong_kernels.py": WRONG}, entry_points=points)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    del sys.modules["wrong_kernels"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("where", "backend", "step"),
    [
        ("transformer.self", "scale", 1),
        ("transformer.cross", "scale", 1),
        ("vae.self", "scale", None),
        ("text_encoder.self", "scale", None),
        ("text_encoder.self", "mask", None),
        ("transformer.cross", "mask", 1),
    ],
)
def test_a_wrong_kernel_stops_the_demo_and_goes_on_to(wrong_kernels, where, backend, step, dtype) -> None:
    engine = Engine.from_pretrained(device="cpu", dtype=dtype, attention={where: backend}, check_attention="first")
    for _ in range(2):  # what disagreed is looked at again
        with pytest.raises(KernelMismatchError) as caught:
            engine.generate("a red circle moving right", guidance_scale=3.0, **REQUEST)
        details = caught.value.details
        assert f"{details['component']}.{details['role']}" == where
        assert (details["backend"], details["step"]) == (backend, step)
        assert details["error"] > 1.5 * details["allowed"]
        assert f"--attention {where}=sdpa" in caught.value.message and details["layer"] in caught.value.message
