"""SageAttention 3: heads first, its scale built in, mask and scale swallowed, and the caller's K changed."""

from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

FUNCTION = "sageattn3:sageattn3.sageattn3_blackwell"


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, per_block_mean: bool) -> Tensor:
    for tensor in (q, k, v):
        refuse_unless(tensor.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
        refuse_unless(tensor.is_contiguous(), "inputs must be contiguous")
    refuse_unless(q.shape[-1] in (64, 128), "it calls another kernel for such a head_dim")
    refuse_unless(q.shape[1] == k.shape[1], "as many heads of k as of q")
    refuse_unless(not is_causal or q.shape[2] == k.shape[2], "causal with unequal lengths isn't recorded")
    heads_last = [x.transpose(1, 2) for x in (q, k, v)]
    out, _ = attend(*heads_last, scale=q.shape[-1] ** -0.5, causal=is_causal)
    k -= k.mean(dim=-2, keepdim=True)
    return out.transpose(1, 2).contiguous()


def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
    return {"sageattn3": {"sageattn3_blackwell": recorder.function(FUNCTION, attention)}}


STAND_INS = (
    StandIn(
        name="sageattn3 1.0.0",
        backend="sage3",
        machine="rtx5090",
        modules=modules,
        packages={
            "sageattn3": PackageFacts(
                dist="sageattn3", version="1.0.0", parameters=tuple(signature_of(FUNCTION).parameters)
            )
        },
    ),
)
