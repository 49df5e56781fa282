"""Moore Threads' mate: one function for dense [B, S, H, D] and for packed [tokens, H, D]."""

from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

FUNCTION = "mate:mate.mha_interface.flash_attn_varlen_func"


def _as_read(k: Tensor) -> Tensor:
    """K as its kernel for heads up to 128 sees it: zeros further from the start than K has elements."""
    place = torch.zeros((), dtype=torch.long)
    for size, stride in zip(k.shape, k.stride(), strict=True):
        place = place[..., None] + torch.arange(size) * stride
    return k.masked_fill(place >= k.numel(), 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    return_attn_probs: bool,
    return_softmax_lse: bool,
) -> Any:
    size = q.shape[-1]
    for tensor in (q, k, v):
        refuse_unless(tensor.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16")
        refuse_unless(tensor.dtype == q.dtype, "inputs must have the same dtype")
        refuse_unless(tensor.stride(-1) == 1, "the last dimension must be contiguous")
    refuse_unless(q.numel() > 0 and k.numel() > 0, "what it does without queries or keys isn't recorded")
    refuse_unless(q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv", AssertionError)
    refuse_unless(size <= 128 or 192 < size <= 256, f"Add config for headdim {size}-{size}", AssertionError)
    refuse_unless(all(x.stride(i) % 8 == 0 for x in (q, k, v) for i in range(x.ndim - 1)), "rows aren't aligned")
    k = _as_read(k) if size <= 128 else k
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    if cu_seqlens_q is None or cu_seqlens_k is None:
        refuse_unless(q.ndim == 4, "q must be [B, S, H, D] where there are no cu_seqlens")
        out, lse = attend(q, k, v, scale=scale, causal=causal)
    else:
        refuse_unless(q.ndim == 3, "q must be [total, H, D] where there are cu_seqlens")
        for offsets, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
            refuse_unless(longest is not None, "max_seqlen must be provided", AssertionError)
            refuse_unless(offsets.dtype == torch.int32, "cu_seqlens must be int")
            # Blocks beyond the longest document are never started.
            refuse_unless(int(offsets.diff().max()) <= (longest or 0), "max_seqlen is shorter than a document")
        out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, causal=causal)
    # What its kernels leave in rows that see nothing isn't recorded.
    is_empty = lse == -torch.inf
    out, lse = out.masked_fill(is_empty.mT[..., None], torch.nan), lse.masked_fill(is_empty, torch.nan)
    return (out, lse) if return_attn_probs or return_softmax_lse else out


def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
    return {"mate.mha_interface": {"flash_attn_varlen_func": recorder.function(FUNCTION, attention)}}


STAND_INS = (
    StandIn(
        name="mate at 99bbf1f",
        backend="mate",
        machine="mtt-s5000",
        modules=modules,
        packages={
            "mate": PackageFacts(dist="mate", version="0.2.7", parameters=tuple(signature_of(FUNCTION).parameters))
        },
    ),
)
