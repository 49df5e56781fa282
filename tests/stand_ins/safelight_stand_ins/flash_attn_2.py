"""flash-attn 2: dense [B, S, H, D], packed [tokens, H, D]; rows that see nothing have LSE +inf."""

from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

DENSE = "flash-attn:flash_attn.flash_attn_func"
PACKED = "flash-attn:flash_attn.flash_attn_varlen_func"


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        refuse_unless(tensor.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
        refuse_unless(tensor.stride(-1) == 1, "the last dimension must be contiguous")
        refuse_unless(tensor.shape[-1] <= 256, "head dimension at most 256")
    q, k, _ = tensors
    refuse_unless(q.shape[-2] % k.shape[-2] == 0, "heads of q must be a multiple of those of k and v")


def dense(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, return_attn_probs: bool) -> Any:
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = attend(q, k, v, scale=scale, causal=causal, empty_lse=torch.inf)
    return (out, lse, None) if return_attn_probs else out


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    return_attn_probs: bool,
) -> Any:
    _check(q, k, v)
    for offsets, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        refuse_unless(offsets.dtype == torch.int32, "cu_seqlens must be int32")
        # The kernel's grid has as many rows of blocks as this says: with less, the ends of documents stay unwritten.
        refuse_unless(int(offsets.diff().max()) <= longest, "max_seqlen is shorter than a document")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, causal=causal, empty_lse=torch.inf)
    return (out, lse, None) if return_attn_probs else out


def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
    functions = {
        "flash_attn_func": recorder.function(DENSE, dense),
        "flash_attn_varlen_func": recorder.function(PACKED, packed),
    }
    return {"flash_attn": functions}


STAND_INS = (
    StandIn(
        name="flash-attn 2.8.3",
        backend="flash2",
        machine="a100",
        modules=modules,
        packages={
            "flash_attn_2": PackageFacts(
                dist="flash-attn", version="2.8.3", parameters=tuple(signature_of(DENSE).parameters)
            )
        },
    ),
)
