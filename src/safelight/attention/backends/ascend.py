"""ascend: the fused inference attention of Huawei's Ascend, through torch_npu."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor

# Its rows of features are padded to a multiple of this.
UNIT = 16
# Causal at the bottom right, by a mask of this edge that stands for one of any size.
BOTTOM_RIGHT = 3
COMPRESSED_EDGE = 2048
# What the rows with nothing to attend to give is defined in this mode alone.
WITH_EMPTY_ROWS = 2
MOST_HEADS = 256
MOST_GROUPED = 64


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    import torch
    from torch.nn.functional import pad
    from torch_npu import npu_fused_infer_attention_score

    from safelight.attention.masks import clear_blind, clear_blind_packed, empty_result, full_mask, is_empty

    needs_lse = requirements.needs_lse
    heads = {"num_heads": requirements.num_heads, "num_key_value_heads": requirements.num_kv_heads}
    compressed: dict[torch.device, Tensor] = {}

    def bottom_right(device: torch.device) -> "dict[str, Any]":
        if device not in compressed:
            edge = torch.ones(COMPRESSED_EDGE, COMPRESSED_EDGE, dtype=torch.bool, device=device)
            compressed[device] = edge.triu(1)
        return {"atten_mask": compressed[device], "sparse_mode": BOTTOM_RIGHT, "inner_precise": WITH_EMPTY_ROWS}

    def ascend(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        queries, keys, head_dim = q.shape[1], k.shape[1], q.shape[-1]
        if queries == 0 or keys == 0:
            return empty_result(q, with_lse=needs_lse)
        # Its own default is 1, and head_dim as it is here, before it is padded.
        options = {"scale": head_dim**-0.5 if scale is None else scale, "softmax_lse_flag": needs_lse, **heads}
        q, k, v = (pad(x, (0, -head_dim % UNIT)).contiguous() for x in (q, k, v))
        if layout is not None and layout.offsets is not None:
            assert mask is None, "packed documents take no mask"
            out, lse = npu_fused_infer_attention_score(
                q[0],
                k[0],
                v[0],
                input_layout="TND",
                actual_seq_lengths=list(layout.starts[1:]),
                actual_seq_lengths_kv=list(layout.key_starts[1:]),
                **(bottom_right(q.device) if causal else {}),
                **options,
            )
            out = out[None, ..., :head_dim]
            # It comes as tokens by heads by one.
            lse = lse[..., 0].T.contiguous()[None] if needs_lse else None
            clear_blind_packed(out, lse, layout, causal=causal)
            return (out, lse) if needs_lse else out
        hidden = None
        if mask is not None:
            hidden = full_mask(mask, causal=causal, queries=queries, keys=keys, device=q.device)
            assert hidden is not None
            # It is told what to leave out, in a mask that is the same for all heads.
            whole = (~hidden).expand(q.shape[0], 1, queries, keys).contiguous()
            options |= {"atten_mask": whole, "inner_precise": WITH_EMPTY_ROWS}
        elif causal:
            options |= bottom_right(q.device)
        out, lse = npu_fused_infer_attention_score(q, k, v, input_layout="BSND", **options)
        out = out[..., :head_dim]
        # [batch, heads, seq, 1], also where heads come after seq in the output.
        lse = lse[..., 0].contiguous() if needs_lse else None
        if hidden is not None:
            nothing = is_empty(hidden)[..., 0]
            out = out.masked_fill(nothing.transpose(1, 2)[..., None], 0)
            lse = None if lse is None else lse.masked_fill(nothing, -torch.inf)
        else:
            clear_blind(out, lse, keys, causal=causal)
        return (out, lse) if needs_lse else out

    return ascend


def takes(head_dim: int) -> bool:
    """Up to 512, in multiples of 16: what is between is padded."""
    return head_dim <= 512


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """The operator's limits on heads, and its one way to say lengths."""
    reasons = []
    if requirements.num_heads > MOST_HEADS:
        reasons.append(f"no {requirements.num_heads} heads (takes {MOST_HEADS})")
    if requirements.num_heads > MOST_GROUPED * requirements.num_kv_heads:
        reasons.append(
            f"no {requirements.num_heads} heads on {requirements.num_kv_heads} (takes {MOST_GROUPED} on each)"
        )
    if requirements.packed_varlen and requirements.mask != "none":
        reasons.append(f"no packed varlen together with mask {requirements.mask}")
    return tuple(Reason("capability", reason) for reason in reasons)


BACKEND = AttentionBackend(
    name="ascend",
    summary="Ascend's fused inference attention (torch_npu)",
    load=load,
    aliases=("ascend_fa", "ascend_attn", "ascend_flash_attn", "npu", "npu_fa", "_native_npu"),
    platforms=frozenset({"npu"}),
    arches={"npu": ("ascend910b", "ascend910c", "ascend950")},
    package=Package(
        key="torch_npu",
        dists=("torch-npu",),
        remedy="pip install torch-npu in the release of the installed torch, and source CANN's set_env.sh",
        module="torch_npu",
        function="npu_fused_infer_attention_score",
    ),
    head_dims=takes,
    head_dims_text="up to 512",
    # Its mask is one for all heads: neither dense nor bias.
    masks=frozenset({"none", "key_padding"}),
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
