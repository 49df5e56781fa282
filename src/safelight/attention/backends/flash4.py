"""flash4: FlashAttention-4, compiled at the first call, for Hopper and the sm100 family."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    from safelight.attention.masks import clear_blind, clear_blind_packed, empty_result, with_dense_features

    needs_lse = requirements.needs_lse

    def flash4(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        assert mask is None, "flash4 takes no mask"
        if q.shape[1] == 0 or k.shape[1] == 0:
            return empty_result(q, with_lse=needs_lse)
        q, k, v = with_dense_features(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        # Both functions always return two values; the second is None unless it is asked for.
        if layout is None or layout.offsets is None:
            out, lse = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_lse=needs_lse)
            clear_blind(out, lse, k.shape[1], causal=causal)
        else:
            longest, longest_keys = layout.longest
            out, lse = flash_attn_varlen_func(
                q[0],
                k[0],
                v[0],
                cu_seqlens_q=layout.offsets,
                cu_seqlens_k=layout.offsets if layout.key_offsets is None else layout.key_offsets,
                max_seqlen_q=longest,
                max_seqlen_k=longest_keys,
                softmax_scale=scale,
                causal=causal,
                return_lse=needs_lse,
            )
            out, lse = out[None], None if lse is None else lse[None]
            clear_blind_packed(out, lse, layout, causal=causal)
        return (out, lse) if needs_lse else out

    return flash4


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 256, which Hopper's kernel takes."""
    return head_dim % 8 == 0 and head_dim <= 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """The sm100 family's kernel takes smaller heads."""
    # It has a separate kernel for 256, which isn't known to take everything else that is declared here.
    if machine.platform == "cuda" and machine.arch in ("sm100", "sm103") and 128 < requirements.head_dim <= 256:
        return (Reason("capability", f"no head_dim {requirements.head_dim} on {machine.arch} (takes up to 128 there)"),)
    return ()


BACKEND = AttentionBackend(
    name="flash4",
    summary="FlashAttention-4 (flash-attn-4), for Hopper and Blackwell's sm100 family",
    load=load,
    aliases=("fa4", "flash_4", "flash_attn_4", "flash_attention_4", "_flash_4"),
    # It has kernels for sm80 and sm120 as well, whose limits nothing checks: not until somebody has tried them.
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm90", "sm100", "sm103")},
    package=Package(
        key="flash_attn_4",
        dists=("flash-attn-4", "fa4"),
        remedy="pip install --pre flash-attn-4; where flash-attn is installed too, flash-attn-4 must come after it",
        # flash-attn brings a folder of this name, too, with an older file.
        owns="flash_attn/cute/interface.py",
        needs=("cutlass", "quack"),
        module="flash_attn.cute",
        function="flash_attn_func",
        # Betas differ in what they take and return; this is the oldest that the declaration was held to.
        min_version="4.0.0b36",
    ),
    head_dims=takes,
    head_dims_text="multiples of 8 up to 256",
    # No masks: it takes functions in its own language, not tensors. No key_padding, as with flash2.
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
