"""vllm-xpu-kernels: packed [tokens, H, D] alone, with arguments in an order of its own."""

from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

PACKED = "vllm-xpu-kernels:vllm_xpu_kernels.flash_attn_interface.flash_attn_varlen_func"

# (head_dim, causal) of the kernels for unpaged keys, without LSE, that the wheel's library for Xe2 defines.
COMPILED = {
    (64, False),
    (64, True),
    (80, False),
    (96, False),
    (128, False),
    (128, True),
    (192, True),
    (256, False),
    (256, True),
}


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
) -> Tensor:
    refuse_unless(cu_seqlens_k is not None, "cu_seqlens_k or seqused_k must be provided", AssertionError)
    assert cu_seqlens_k is not None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    for tensor in (q, k, v):
        refuse_unless(tensor.dtype in (torch.float16, torch.bfloat16), "only supports fp16, bf16, and fp8 query types")
        refuse_unless(tensor.ndim == 3, "query must be in ragged format")
        is_aligned = all(stride * tensor.element_size() % 64 == 0 for stride in tensor.stride()[:-1])
        refuse_unless(is_aligned, "stride is not 64-byte aligned")
    for offsets, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        refuse_unless(offsets.dtype == torch.int32, "cu_seqlens must have dtype torch.int32")
        refuse_unless(offsets.is_contiguous(), "cu_seqlens must be contiguous")
        # Blocks beyond the longest document are never started.
        refuse_unless(int(offsets.diff().max()) <= longest, "max_seqlen is shorter than a document")
    # The package catches this one and calls attention in Python; an adapter mustn't let it come to that.
    refuse_unless((q.shape[-1], causal) in COMPILED, "Chunk prefill kernel tuple not compiled for this configuration.")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, causal=causal)
    # What its kernel leaves in rows that see nothing isn't recorded.
    return out.masked_fill((lse == -torch.inf).mT[..., None], torch.nan)


def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
    attributes = {
        "FA2_AVAILABLE": True,
        "FA2_UNAVAILABLE_REASON": None,
        "DEFAULT_FA_VERSION": 2,
        "flash_attn_varlen_func": recorder.function(PACKED, packed),
    }
    return {"vllm_xpu_kernels.flash_attn_interface": attributes}


STAND_INS = (
    StandIn(
        name="vllm-xpu-kernels 0.1.16.2",
        backend="xpu_flash",
        machine="intel-b580",
        modules=modules,
        packages={
            "xpu_flash": PackageFacts(
                dist="vllm-xpu-kernels", version="0.1.16.2", parameters=tuple(signature_of(PACKED).parameters)
            )
        },
    ),
)
