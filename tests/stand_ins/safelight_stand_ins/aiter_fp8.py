"""aiter's 8-bit function, before and after it wanted to be told the scales of its inputs; its output is bfloat16."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.aiter import RELEASES
from safelight_stand_ins.maths import attend, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

FP8 = torch.float8_e4m3fnuz  # of the gfx942


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    for tensor in (q, k, v):
        refuse_unless(tensor.dtype == FP8, f"inputs must be {FP8}")
        refuse_unless(tensor.stride(-1) == 1, "the last dimension must be contiguous")
        refuse_unless(tensor.shape[-1] == 128, "head dimension must be 128")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(q.float(), k.float(), v.float(), scale=scale, causal=causal)[0]


def without_descales(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> Tensor:
    return _attend(q, k, v, softmax_scale, causal).bfloat16()


def with_descales(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor,
    k_descale: Tensor,
    v_descale: Tensor,
    causal: bool,
    softmax_scale: float | None,
) -> Tensor:
    for descale in (q_descale, k_descale, v_descale):
        refuse_unless(descale.dtype == torch.float32 and descale.numel() == 1, "descales are float32 of one element")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = _attend(q, k, v, scale * float(q_descale * k_descale), causal)
    return (out * v_descale).bfloat16()


def modules(recorder: Recorder, release: str) -> dict[str, dict[str, Any]]:
    body = with_descales if "@main" in release else without_descales
    function = recorder.function(f"{release}:aiter.flash_attn_fp8_pertensor_func", body)
    return {"aiter": {"flash_attn_fp8_pertensor_func": function}, "aiter.dtypes": {"fp8": FP8}}


STAND_INS = tuple(
    StandIn(
        name=f"amd-aiter {version}",
        backend="aiter_fp8",
        machine="mi300x-rocm7-aiter",
        modules=partial(modules, release=release),
        packages={
            "amd_aiter": PackageFacts(
                dist="amd-aiter",
                version=version,
                parameters=tuple(signature_of(f"{release}:aiter.flash_attn_func").parameters),
            )
        },
    )
    for release, version in RELEASES.items()
)
