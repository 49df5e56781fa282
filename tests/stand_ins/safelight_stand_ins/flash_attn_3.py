"""flash-attn 3: dense [B, S, H, D], packed [tokens, H, D], in the three generations of its functions and as fa3-fwd.

The first generation always returns (out, LSE), the second out alone, with one signature between them; the third
returns what it is asked for, and fa3-fwd is a smaller build of that one, in a module of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

OLD = "flash_attn_3-old:flash_attn_interface"
NEW = "flash_attn_3:flash_attn_interface"
FORWARD_ONLY = "fa3-fwd:fa3_fwd_interface"


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for tensor in (q, k, v):
        refuse_unless(
            tensor.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports fp16, bf16 and fp8"
        )
        refuse_unless(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        refuse_unless(tensor.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
        refuse_unless(tensor.shape[-1] % 8 == 0, "head_size should be a multiple of 8")
    refuse_unless(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")


def _check_forward_only(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check(q, k, v)
    refuse_unless(q.dtype != torch.float16, "This flash attention build does not support FP16.")
    refuse_unless(q.shape[-1] in (64, 96, 128, 192, 256), "this build has no such head dimension")


def _dense(
    check: Callable[..., None], q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    check(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # On the host, without any keys, it fills with +inf; its kernel gives rows that see nothing -inf.
    return attend(q, k, v, scale=scale, causal=causal, empty_lse=-torch.inf if k.shape[1] else torch.inf)


def _packed(
    check: Callable[..., None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    softmax_scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    check(q, k, v)
    for starts, most in zip(offsets, longest, strict=True):
        refuse_unless(starts.dtype == torch.int32, "cu_seqlens must have dtype torch.int32")
        # Blocks beyond the longest document are never started: the ends of longer ones would stay unwritten.
        refuse_unless(int(starts.diff().max()) <= most, "max_seqlen is shorter than a document")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return attend_packed(q, k, v, *offsets, scale=scale, causal=causal)


def _old(record: str, *, returns_lse: bool) -> Callable[[Recorder], Mapping[str, Mapping[str, Any]]]:
    """The package's modules in the first two generations."""

    def dense(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> Any:
        result = _dense(_check, q, k, v, softmax_scale, causal)
        return result if returns_lse else result[0]

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
    ) -> Any:
        offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        result = _packed(_check, q, k, v, offsets, longest, softmax_scale, causal)
        return result if returns_lse else result[0]

    return _modules(record, dense, packed)


def _new(record: str, check: Callable[..., None]) -> Callable[[Recorder], Mapping[str, Mapping[str, Any]]]:
    """The package's modules in the third generation."""

    def dense(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, return_attn_probs: bool
    ) -> Any:
        result = _dense(check, q, k, v, softmax_scale, causal)
        return result if return_attn_probs else result[0]

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
        offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        result = _packed(check, q, k, v, offsets, longest, softmax_scale, causal)
        return result if return_attn_probs else result[0]

    return _modules(record, dense, packed)


def _modules(
    record: str, dense: Callable[..., Any], packed: Callable[..., Any]
) -> Callable[[Recorder], Mapping[str, Mapping[str, Any]]]:
    def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
        functions = {
            "flash_attn_func": recorder.function(f"{record}.flash_attn_func", dense),
            "flash_attn_varlen_func": recorder.function(f"{record}.flash_attn_varlen_func", packed),
        }
        return {record.partition(":")[2]: functions}

    return modules


def _stand_in(
    name: str,
    record: str,
    modules: Callable[[Recorder], Mapping[str, Mapping[str, Any]]],
    *,
    dist: str,
    version: str,
    variant: str | None = None,
) -> StandIn:
    parameters = tuple(signature_of(f"{record}.flash_attn_func").parameters)
    facts = PackageFacts(dist=dist, version=version, variant=variant, parameters=parameters)
    return StandIn(name=name, backend="flash3", machine="h200", modules=modules, packages={"flash_attn_3": facts})


STAND_INS = (
    _stand_in(
        "flash-attn-3 that always returns LSE", OLD, _old(OLD, returns_lse=True), dist="flash_attn_3", version="3.0.0b1"
    ),
    _stand_in(
        "flash-attn-3 that never returns LSE", OLD, _old(OLD, returns_lse=False), dist="flash_attn_3", version="3.0.0b1"
    ),
    _stand_in("flash-attn-3 3.0.0", NEW, _new(NEW, _check), dist="flash_attn_3", version="3.0.0"),
    _stand_in(
        "fa3-fwd 0.0.3",
        FORWARD_ONLY,
        _new(FORWARD_ONLY, _check_forward_only),
        dist="fa3-fwd",
        version="0.0.3",
        variant="fa3-fwd",
    ),
)
