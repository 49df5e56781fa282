"""cudnn: cuDNN's fused attention, through the operator that torch has for it."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout
from safelight.attention.requirements import AttentionRequirements

if TYPE_CHECKING:
    from torch import Tensor

# A bias has rows that lie this many elements apart, or a multiple.
ALIGNMENT = 8


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    import torch
    from torch.nn.functional import pad

    from safelight.attention.masks import additive, empty_result, full_mask, is_empty

    needs_lse = requirements.needs_lse
    groups = requirements.num_heads // requirements.num_kv_heads
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def cudnn(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        assert layout is None or layout.offsets is None, "cudnn takes no packed documents"
        queries, keys = q.shape[1], k.shape[1]
        if queries == 0 or keys == 0:
            return empty_result(q, with_lse=needs_lse)
        # Its own causal is for queries and keys of one length, and without a bias.
        is_square = causal and queries == keys and mask is None
        hidden = full_mask(mask, causal=causal and not is_square, queries=queries, keys=keys, device=q.device)
        bias = None
        if hidden is not None:
            bias = pad(additive(hidden, q.dtype), (0, -keys % ALIGNMENT))
            bias = bias.expand(q.shape[0], q.shape[2], queries, -1)[..., :keys]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        # Heads first, and side by side in memory: with other strides its results are wrong.
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, lse, *_ = attend(q, k, v, bias, needs_lse, 0.0, is_square, False, scale=scale)
        out = out.transpose(1, 2)
        if needs_lse:
            # [batch, heads, seq], with one more dimension since torch 2.9.
            lse = lse.reshape(lse.shape[:3]).contiguous()
        if hidden is not None:
            nothing = is_empty(hidden)[..., 0]
            out = out.masked_fill(nothing.transpose(1, 2)[..., None], 0)
            lse = lse.masked_fill(nothing, -torch.inf) if needs_lse else lse
        return (out, lse) if needs_lse else out

    return cudnn


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 128: more than that depends on the cuDNN version, which isn't among the facts."""
    return head_dim % 8 == 0 and head_dim <= 128


BACKEND = AttentionBackend(
    name="cudnn",
    summary="cuDNN's fused attention, as torch calls it",
    load=load,
    aliases=("cudnn_attn", "cudnn_attention", "_native_cudnn"),
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")},
    head_dims=takes,
    head_dims_text="multiples of 8 up to 128",
    # Its bias is additive and per head, so every mask fits in; causal with unequal lengths becomes one as well.
    masks=frozenset({"none", "key_padding", "dense", "bias"}),
    lse=True,
)
