"""xformers: its memory-efficient attention, on CUDA up to Hopper."""

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor

# Rows of a bias lie this many elements apart, or a multiple.
ALIGNMENT = 8


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from torch.nn.functional import pad
    from xformers.ops import memory_efficient_attention_forward, memory_efficient_attention_forward_requires_grad
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, BlockDiagonalMask, LowerTriangularMask

    from safelight.attention.masks import (
        additive,
        clear_blind_packed,
        empty_result,
        full_mask,
        is_empty,
        with_dense_features,
    )

    needs_lse = requirements.needs_lse
    attend = memory_efficient_attention_forward_requires_grad if needs_lse else memory_efficient_attention_forward
    heads, groups = requirements.num_heads, requirements.num_kv_heads
    is_grouped = heads != groups

    def bias_of(mask: "Tensor", q: "Tensor", keys: int) -> "Tensor":
        """An additive mask for every row, head and query, in rows that are aligned."""
        bias = pad(additive(mask, q.dtype), (0, -keys % ALIGNMENT))[..., :keys]
        bias = bias.expand(q.shape[0], heads, q.shape[1], keys)
        if bias.stride(-2) % ALIGNMENT or bias.stride(-2) == 0:
            # One row for all queries has no distance from the next.
            bias = pad(bias, (0, -keys % ALIGNMENT)).contiguous()[..., :keys]
        return bias.unflatten(1, (groups, heads // groups)) if is_grouped else bias

    def xformers(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        if queries == 0 or keys == 0:
            return empty_result(q, with_lse=needs_lse)
        is_packed = layout is not None and layout.offsets is not None
        hidden: Tensor | None = None
        if layout is not None and is_packed:
            assert mask is None, "packed documents take no mask"
            kind = BlockDiagonalCausalMask if causal else BlockDiagonalMask
            lengths = (
                [end - start for start, end in pairwise(starts)] for starts in (layout.starts, layout.key_starts)
            )
            bias = kind.from_seqlens(*lengths)
        elif mask is None and causal and queries == keys:
            bias = LowerTriangularMask()
        else:
            hidden = full_mask(mask, causal=causal, queries=queries, keys=keys, device=q.device)
            bias = None if hidden is None else bias_of(hidden, q, keys)
        q, k, v = with_dense_features(q, k, v)
        if is_grouped:
            # [batch, seq, groups, heads of a group, head_dim], where keys are the same for the heads of a group.
            per_group = heads // groups
            q = q.unflatten(2, (groups, per_group))
            k, v = (x[:, :, :, None].expand(-1, -1, -1, per_group, -1) for x in (k, v))
        out = attend(q, k, v, attn_bias=bias, scale=q.shape[-1] ** -0.5 if scale is None else scale)
        lse = None
        if needs_lse:
            out, lse = out
            # Some of its operators pad it to a whole block of queries.
            lse = lse.reshape(batch, heads, -1)[:, :, :queries].float().contiguous()
        out = out.flatten(2, 3) if is_grouped else out
        if layout is not None and is_packed:
            clear_blind_packed(out, lse, layout, causal=causal)
        elif hidden is not None:
            nothing = is_empty(hidden)[..., 0]
            out = out.masked_fill(nothing.transpose(1, 2)[..., None], 0)
            lse = None if lse is None else lse.masked_fill(nothing, -math.inf)
        return (out, lse) if needs_lse else out

    return xformers


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 256, which all of its operators take."""
    return head_dim % 8 == 0 and head_dim <= 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """It is given one bias: packed documents or a mask; causal documents have to have as many keys as queries."""
    reasons = []
    if requirements.packed_varlen and requirements.mask != "none":
        reasons.append(f"no packed varlen together with mask {requirements.mask}")
    if requirements.packed_varlen and requirements.causal and not requirements.equal_lengths:
        # Its mask that is aligned at the bottom right refuses documents with fewer keys than queries.
        reasons.append("no causal packed varlen with unequal lengths of queries and keys")
    return tuple(Reason("capability", reason) for reason in reasons)


BACKEND = AttentionBackend(
    name="xformers",
    summary="xFormers' memory_efficient_attention",
    load=load,
    aliases=("xformers_attn", "memory_efficient_attention", "xformers_memory_efficient_attention"),
    # Its operators that take a mask end at sm90. Its operator for ROCm isn't declared: nobody has tried it here.
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90")},
    package=Package(
        key="xformers",
        dists=("xformers",),
        remedy="pip install xformers, in the release made for the installed torch",
        module="xformers.ops",
        function="memory_efficient_attention",
        min_version="0.0.29",
    ),
    head_dims=takes,
    head_dims_text="multiples of 8 up to 256",
    # Every mask becomes an additive one, and causal goes into it.
    masks=frozenset({"none", "key_padding", "dense", "bias"}),
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
