"""sdpa: torch's scaled_dot_product_attention, on every device that torch has."""

from typing import TYPE_CHECKING

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts

if TYPE_CHECKING:
    from torch import Tensor


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    is_grouped = requirements.num_kv_heads != requirements.num_heads

    def sdpa(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> "Tensor":
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None, :]
        queries, keys = q.shape[1], k.shape[1]
        if causal and (queries != keys or mask is not None):
            # torch aligns is_causal at the top left; ours is the bottom right.
            visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
            if mask is None:
                mask = visible
            else:
                mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
            causal = False
        if mask is not None and mask.dtype != torch.bool and mask.dtype != q.dtype:
            mask = mask.to(q.dtype)
        out = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=is_grouped,
        )
        if mask is not None and q.device.type != "cpu":
            # Torch's CPU kernels give such a row zeros; of the others that isn't known, and some have given NaN.
            has_nothing = ~mask.any(-1, keepdim=True) if mask.dtype == torch.bool else mask.amax(-1, True) == -torch.inf
            out = out.masked_fill(has_nothing, 0)
        return out.transpose(1, 2)

    return sdpa


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """Metal has no float64."""
    if machine.platform == "mps" and requirements.dtype == "float64":
        return (Reason("capability", "no dtype float64 on mps (Metal has none)"),)
    return ()


BACKEND = AttentionBackend(
    name="sdpa",
    summary="torch.nn.functional.scaled_dot_product_attention: torch's own choice of fused kernels",
    load=load,
    aliases=("torch", "torch_sdpa", "native", "scaled_dot_product_attention"),
    dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
    masks=frozenset({"none", "key_padding", "dense", "bias"}),
    why_not=why_not,
)
