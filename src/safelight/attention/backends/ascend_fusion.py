"""ascend_fusion: the fusion attention of Huawei's Ascend that training uses, through torch_npu; it has float32."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    import torch
    from torch_npu import npu_fusion_attention

    from safelight.attention.masks import empty_result, full_mask, is_empty

    needs_lse = requirements.needs_lse

    def ascend_fusion(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        assert layout is None or layout.offsets is None, "ascend_fusion takes no packed documents"
        queries, keys = q.shape[1], k.shape[1]
        if queries == 0 or keys == 0:
            return empty_result(q, with_lse=needs_lse)
        hidden = full_mask(mask, causal=causal, queries=queries, keys=keys, device=q.device)
        # It is told what to leave out, in a mask that is the same for all heads.
        whole = None if hidden is None else (~hidden).expand(q.shape[0], 1, queries, keys).contiguous()
        out, highest, total, *_ = npu_fusion_attention(
            *(x.contiguous() for x in (q, k, v)),
            q.shape[2],
            "BSND",
            atten_mask=whole,
            # Its own default is 1.
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
        )
        # Both [batch, heads, seq, 8], with the same number in all lanes.
        lse = highest[..., 0] + total[..., 0].log() if needs_lse else None
        if hidden is not None:
            nothing = is_empty(hidden)[..., 0]
            out = out.masked_fill(nothing.transpose(1, 2)[..., None], 0)
            lse = None if lse is None else lse.masked_fill(nothing, -torch.inf)
        return (out, lse) if needs_lse else out

    return ascend_fusion


def takes(head_dim: int) -> bool:
    """Up to 768."""
    return head_dim <= 768


BACKEND = AttentionBackend(
    name="ascend_fusion",
    summary="Ascend's fusion attention (torch_npu), also in float32",
    load=load,
    aliases=("npu_fusion", "npu_fusion_attention"),
    platforms=frozenset({"npu"}),
    arches={"npu": ("ascend910b", "ascend910c", "ascend950")},
    # The same package as ascend's, word for word.
    package=Package(
        key="torch_npu",
        dists=("torch-npu",),
        remedy="pip install torch-npu in the release of the installed torch, and source CANN's set_env.sh",
        module="torch_npu",
        function="npu_fused_infer_attention_score",
    ),
    dtypes=frozenset({"float16", "bfloat16", "float32"}),
    head_dims=takes,
    head_dims_text="up to 768",
    # Its mask is one for all heads here: neither dense nor bias. No packed documents: one without keys, or a causal one
    # with fewer of them, would have rows without any, which it doesn't allow there.
    masks=frozenset({"none", "key_padding"}),
    lse=True,
)
