"""xFormers: [B, S, H, D] or [B, S, groups, heads, D], aligned additive biases, masks as objects, a padded LSE."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

FUNCTION = "xformers:xformers.ops.memory_efficient_attention"


class LowerTriangularMask:
    """Causal, aligned at the top left."""


@dataclass
class BlockDiagonalMask:
    """Packed documents."""

    q_seqlen: list[int]
    kv_seqlen: list[int]
    causal = False

    @classmethod
    def from_seqlens(cls, q_seqlen: list[int], kv_seqlen: list[int] | None = None) -> Any:
        return cls(list(q_seqlen), list(q_seqlen if kv_seqlen is None else kv_seqlen))


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Packed documents, each causal, aligned at its top left."""

    causal = True


def _top_left(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, scale: float | None) -> tuple[Tensor, Tensor]:
    for tensor in (query, key, value):
        refuse_unless(tensor.dtype in (torch.float16, torch.bfloat16), "No operator found", NotImplementedError)
        refuse_unless(tensor.shape[-1] <= 256 and tensor.shape[-1] % 8 == 0, "No operator found", NotImplementedError)
        refuse_unless(tensor.stride(-1) == 1, "No operator found: last dimension", NotImplementedError)
    refuse_unless(query.shape[2:] == key.shape[2:] == value.shape[2:], "heads have to be expanded", ValueError)
    groups = query.shape[2:-1]
    q, k, v = (x.flatten(2, -2) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries, keys = q.shape[1], k.shape[1]
    if isinstance(attn_bias, BlockDiagonalMask):
        offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (attn_bias.q_seqlen, attn_bias.kv_seqlen)]
        refuse_unless(not attn_bias.causal or torch.equal(*offsets), "aligned at the top left: not ours", ValueError)
        out, lse = attend_packed(q[0], k[0], v[0], *offsets, scale=scale, causal=attn_bias.causal, empty_lse=0.0)
        out, lse = out[None], lse[None]
    else:
        mask = _top_left(queries, keys)[None, None] if isinstance(attn_bias, LowerTriangularMask) else attn_bias
        if isinstance(attn_bias, Tensor):
            refuse_unless(attn_bias.dtype == query.dtype, "attn_bias must have q's dtype", ValueError)
            refuse_unless(attn_bias.stride(-2) % 8 == 0, "attn_bias.stride(-2) % 8 != 0", NotImplementedError)
            refuse_unless(attn_bias.stride(-2) >= keys, "rows of attn_bias overlap", NotImplementedError)
            whole = (q.shape[0], *groups, queries, keys)
            refuse_unless(attn_bias.shape == whole, f"attn_bias must be {list(whole)}", ValueError)
            mask = attn_bias.flatten(1, -3)
        out, lse = attend(q, k, v, scale=scale, mask=mask, empty_lse=0.0)
    lse = pad(lse, (0, -queries % 32), value=1e30)
    return out.unflatten(2, groups), lse.unflatten(1, groups)


def forward(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, scale: float | None) -> Tensor:
    return _attend(query, key, value, attn_bias, scale)[0]


def with_lse(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, scale: float | None) -> tuple[Tensor, Tensor]:
    return _attend(query, key, value, attn_bias, scale)


def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
    return {
        "xformers.ops": {
            "memory_efficient_attention_forward": recorder.function(f"{FUNCTION}_forward", forward),
            "memory_efficient_attention_forward_requires_grad": recorder.function(
                f"{FUNCTION}_forward_requires_grad", with_lse
            ),
        },
        "xformers.ops.fmha.attn_bias": {
            "BlockDiagonalCausalMask": BlockDiagonalCausalMask,
            "BlockDiagonalMask": BlockDiagonalMask,
            "LowerTriangularMask": LowerTriangularMask,
        },
    }


STAND_INS = (
    StandIn(
        name="xformers 0.0.35",
        backend="xformers",
        machine="a100",
        modules=modules,
        packages={
            "xformers": PackageFacts(
                dist="xformers", version="0.0.35", parameters=tuple(signature_of(FUNCTION).parameters)
            )
        },
    ),
)
