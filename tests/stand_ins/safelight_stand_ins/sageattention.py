"""SageAttention 1 and 2: one function of the same name, which swallows what it does not know; 1 changes K in place."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

FIRST = "sageattention==1.0.6:sageattn"
SECOND = "sageattention==2.2.0:sageattn"


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str, is_causal: bool, sm_scale: float | None
) -> tuple[Tensor, Tensor]:
    refuse_unless(tensor_layout in ("HND", "NHD"), "tensor_layout must be HND or NHD", AssertionError)
    for tensor in (q, k, v):
        refuse_unless(tensor.stride(-1) == 1, "the last dimension must be contiguous", AssertionError)
    if tensor_layout == "HND":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    refuse_unless(q.shape[2] % k.shape[2] == 0, "num_qo_heads must be divisible by num_kv_heads", AssertionError)
    refuse_unless(not is_causal or q.shape[1] == k.shape[1], "causal needs equal lengths", AssertionError)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out, lse = attend(q, k, v, scale=scale, causal=is_causal)
    return out if tensor_layout == "NHD" else out.transpose(1, 2), lse


def first(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str, is_causal: bool, sm_scale: float | None, smooth_k: bool
) -> Tensor:
    refuse_unless(q.dtype in (torch.float16, torch.bfloat16, torch.float32), "wrong dtype", AssertionError)
    refuse_unless(q.shape[-1] in (64, 96, 128), "headdim should be in [64, 96, 128]", AssertionError)
    out, _ = _attend(q, k, v, tensor_layout, is_causal, sm_scale)
    if smooth_k:
        k -= k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
    return out


def second(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str, is_causal: bool, sm_scale: float | None, return_lse: bool
) -> Any:
    refuse_unless(q.dtype in (torch.float16, torch.bfloat16), "wrong dtype", AssertionError)
    refuse_unless(q.shape[-1] <= 128, f"Unsupported head_dim: {q.shape[-1]}", ValueError)
    out, lse = _attend(q, k, v, tensor_layout, is_causal, sm_scale)
    return (out, lse) if return_lse else out


def modules(recorder: Recorder, record: str, body: Any) -> dict[str, dict[str, Any]]:
    return {"sageattention": {"sageattn": recorder.function(record, body)}}


STAND_INS = tuple(
    StandIn(
        name=f"sageattention {version}",
        backend="sage",
        machine="rtx4090",
        modules=partial(modules, record=record, body=body),
        packages={
            "sageattention": PackageFacts(
                dist="sageattention", version=version, parameters=tuple(signature_of(record).parameters)
            )
        },
    )
    for version, record, body in (("1.0.6", FIRST, first), ("2.2.0", SECOND, second))
)
