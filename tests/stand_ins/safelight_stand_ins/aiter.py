"""AMD's aiter: dense [B, S, H, D], packed [tokens, H, D] by names in an order of its own; empty rows have LSE 0."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

RELEASES = {"amd-aiter": "0.1.7.post2.dev18", "amd-aiter@main": "0.1.9.dev0"}


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for tensor in (q, k, v):
        refuse_unless(tensor.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
        refuse_unless(tensor.stride(-1) == 1, "the last dimension must be contiguous")
        refuse_unless(tensor.shape[-1] <= 256, "head dimension at most 256")
        refuse_unless(not tensor.requires_grad, "with a gradient, return_lse must be set", AssertionError)
    refuse_unless(q.shape[-2] % k.shape[-2] == 0, "heads of q must be a multiple of those of k and v")


def dense(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, return_lse: bool) -> Any:
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = attend(q, k, v, scale=scale, causal=causal, empty_lse=0.0)
    return (out, lse) if return_lse else out


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
    return_lse: bool,
) -> Any:
    _check(q, k, v)
    for offsets, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        refuse_unless(offsets.dtype == torch.int32, "cu_seqlens must be int32")
        refuse_unless(int(offsets.diff().max()) <= longest, "max_seqlen is shorter than a document")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, causal=causal, empty_lse=0.0)
    return (out, lse) if return_lse else out


def modules(recorder: Recorder, release: str) -> dict[str, dict[str, Any]]:
    functions = {
        "flash_attn_func": recorder.function(f"{release}:aiter.flash_attn_func", dense),
        "flash_attn_varlen_func": recorder.function(f"{release}:aiter.flash_attn_varlen_func", packed),
    }
    return {"aiter": functions}


STAND_INS = tuple(
    StandIn(
        name=f"amd-aiter {version}",
        backend="aiter",
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
