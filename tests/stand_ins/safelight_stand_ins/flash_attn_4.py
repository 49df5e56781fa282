"""flash-attn 4: dense [B, S, H, D], packed [tokens, H, D]; always a pair, whose LSE is None unless asked for."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

DENSE = "flash-attn-4:flash_attn.cute.flash_attn_func"
PACKED = "flash-attn-4:flash_attn.cute.flash_attn_varlen_func"


def _modules(most: int) -> Callable[[Recorder], Mapping[str, Mapping[str, Any]]]:
    """The package's modules on a device whose kernel takes heads of this size at most."""

    def check(q: Tensor, k: Tensor, v: Tensor) -> None:
        for tensor in (q, k, v):
            is_half = tensor.dtype in (torch.float16, torch.bfloat16)
            refuse_unless(is_half, "inputs must be float16 or bfloat16", AssertionError)
            # Its compiled kernels are told that this one is 1, whatever it is.
            refuse_unless(tensor.stride(-1) == 1, "strides of the last mode must be 1", ValueError)
            refuse_unless(tensor.shape[-1] % 8 == 0, "head_dim must be divisible by 8", AssertionError)
            refuse_unless(8 <= tensor.shape[-1] <= most, "head_dim isn't supported on this device", AssertionError)
        refuse_unless(q.numel() > 0 and k.numel() > 0, "what it does without queries or keys isn't recorded")
        refuse_unless(q.shape[-2] % k.shape[-2] == 0, "num_head must be divisible by num_head_kv", AssertionError)

    def left_open(out: Tensor, lse: Tensor) -> Tensor:
        """Of rows that see nothing their LSE of -inf is recorded, and not what it writes."""
        return out.masked_fill((lse == -torch.inf).mT[..., None], torch.nan)

    def dense(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        refuse_unless(q.ndim == k.ndim == v.ndim == 4, "q, k and v must be [B, S, H, D]", AssertionError)
        check(q, k, v)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = attend(q, k, v, scale=scale, causal=causal)
        return left_open(out, lse), lse if return_lse else None

    def packed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        softmax_scale: float | None,
        causal: bool,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        check(q, k, v)
        for offsets, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
            assert offsets is not None and longest is not None, "this stand-in knows packed documents alone"
            refuse_unless(offsets.dtype == torch.int32, "cu_seqlens must be int32", AssertionError)
            # Blocks beyond the longest document are never started.
            refuse_unless(int(offsets.diff().max()) <= longest, "max_seqlen is shorter than a document")
        assert cu_seqlens_q is not None and cu_seqlens_k is not None
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=scale, causal=causal)
        return left_open(out, lse), lse if return_lse else None

    def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
        functions = {
            "flash_attn_func": recorder.function(DENSE, dense),
            "flash_attn_varlen_func": recorder.function(PACKED, packed),
        }
        return {"flash_attn.cute": functions}

    return modules


PACKAGES = {
    "flash_attn_4": PackageFacts(
        dist="flash-attn-4", version="4.0.0b36", parameters=tuple(signature_of(DENSE).parameters)
    )
}

STAND_INS = (
    StandIn(
        name="flash-attn-4 4.0.0b36 on sm100",
        backend="flash4",
        machine="b200",
        modules=_modules(128),
        packages=PACKAGES,
    ),
    StandIn(
        name="flash-attn-4 4.0.0b36 on sm90",
        backend="flash4",
        machine="h100-flash4-only",
        modules=_modules(256),
        packages=PACKAGES,
    ),
)
