"""sdpa: torch's scaled_dot_product_attention, on every device that torch has."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts

if TYPE_CHECKING:
    from torch import Tensor

# torch's efficient kernel wants heads and rows of a bias in multiples of 16 bytes.
ALIGNMENT_BYTES = 16


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from safelight.attention.masks import full_mask, is_empty
    from safelight.attention.packed import each_document

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
        if layout is not None and layout.offsets is not None:
            assert mask is None, "packed documents take no mask"
            out: Tensor = each_document(lambda *qkv: sdpa(*qkv, scale=scale, causal=causal), q, k, v, layout)
            return out
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None, :]
        if causal and (mask is not None or q.shape[1] != k.shape[1]):
            # torch aligns is_causal at the top left; ours is the bottom right.
            mask = full_mask(mask, causal=True, queries=q.shape[1], keys=k.shape[1], device=q.device)
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
            out = out.masked_fill(is_empty(mask), 0)
        return out.transpose(1, 2)

    return _with_lse() if requirements.needs_lse else sdpa


def _with_lse() -> AttentionFn:
    """The kernels behind torch's function that also return the LSE: its flash kernel on CPU, else the efficient one."""
    import torch

    from safelight.attention.masks import additive, empty_result, full_mask, is_empty, with_dense_features
    from safelight.attention.packed import each_document

    def sdpa_with_lse(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        if layout is not None and layout.offsets is not None:
            assert mask is None, "packed documents take no mask"
            return each_document(lambda *qkv: sdpa_with_lse(*qkv, scale=scale, causal=causal), q, k, v, layout)
        queries, keys = q.shape[1], k.shape[1]
        if queries == 0 or keys == 0:
            return empty_result(q, with_lse=True)  # the CPU kernel would end the process
        is_square = causal and queries == keys and mask is None
        mask = full_mask(mask, causal=causal and not is_square, queries=queries, keys=keys, device=q.device)
        bias = None if mask is None else additive(mask, q.dtype)
        # The CPU kernel reads features as if they lay side by side, also where they don't; the other refuses them.
        q, k, v = with_dense_features(q, k, v)
        attend = _flash_on_cpu if q.device.type == "cpu" else _efficient
        out, lse = attend(q, k, v, bias, is_square, q.shape[-1] ** -0.5 if scale is None else scale)
        lse = lse.to(torch.float32).contiguous()
        if mask is not None:
            nothing = is_empty(mask)
            out = out.masked_fill(nothing, 0)
            lse = lse.masked_fill(nothing[..., 0], -torch.inf)
        return out.transpose(1, 2), lse

    return sdpa_with_lse


def _flash_on_cpu(
    q: "Tensor", k: "Tensor", v: "Tensor", bias: "Tensor | None", causal: bool, scale: float
) -> "tuple[Tensor, Tensor]":
    import torch

    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse


def _efficient(
    q: "Tensor", k: "Tensor", v: "Tensor", bias: "Tensor | None", causal: bool, scale: float
) -> "tuple[Tensor, Tensor]":
    import torch
    from torch.nn.functional import pad

    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    unit = ALIGNMENT_BYTES // q.element_size()
    head_dim, queries, keys = q.shape[-1], q.shape[1], k.shape[1]
    q_BHSD, k_BHTD, v_BHTD = (pad(x, (0, -head_dim % unit)).transpose(1, 2) for x in (q, k, v))
    if bias is not None:
        # Rows lie in memory a multiple of the unit apart, and there is one for every head and query.
        bias = pad(bias, (0, -keys % unit))[..., :keys].expand(q.shape[0], q.shape[2], queries, keys)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BHSD, k_BHTD, v_BHTD, bias, True, 0.0, causal, scale=scale
    )
    # Its LSE is longer than the queries, by up to a block.
    return out[..., :head_dim], lse[..., :queries]


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """Metal has no float64; the LSE is known from CPU, CUDA and ROCm alone; a mask and packed documents exclude."""
    reasons = []
    if machine.platform == "mps" and requirements.dtype == "float64":
        reasons.append("no dtype float64 on mps (Metal has none)")
    if requirements.needs_lse and machine.platform not in ("cpu", "cuda", "rocm"):
        reasons.append(f"no LSE on {machine.platform} (torch returns it on cpu, cuda and rocm)")
    elif requirements.needs_lse and requirements.dtype == "float64" and machine.platform != "cpu":
        reasons.append(f"no LSE in float64 on {machine.platform} (on cpu alone)")
    if requirements.packed_varlen and requirements.mask != "none":
        reasons.append(f"no packed varlen together with mask {requirements.mask}")
    return tuple(Reason("capability", reason) for reason in reasons)


BACKEND = AttentionBackend(
    name="sdpa",
    summary="torch.nn.functional.scaled_dot_product_attention: torch's own choice of fused kernels",
    load=load,
    aliases=("torch", "torch_sdpa", "native", "scaled_dot_product_attention"),
    dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
    masks=frozenset({"none", "key_padding", "dense", "bias"}),
    # Documents are slices, one call each.
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
