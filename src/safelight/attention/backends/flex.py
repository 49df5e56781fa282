"""flex: torch's FlexAttention, compiled for the masks of a layer."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts

if TYPE_CHECKING:
    from torch import Tensor

# Forms (dtypes, kinds of masks, sizes of one) that it may be compiled for in a process. A model needs a few.
MOST_FORMS = 256
# What the facts of a CPU machine call its C++ compiler.
COMPILER = "cxx"


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements, compiled at its first call in each form."""
    import inspect

    import torch
    from torch.nn.attention import flex_attention as torch_flex

    # Without a whole graph, or after too many forms, torch would quietly call the function uncompiled, which holds all
    # scores in memory; like this it raises.
    options: dict[str, Any] = {"fullgraph": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = MOST_FORMS
    for_any_size = torch.compile(torch_flex.flex_attention, dynamic=True, **options)
    # For CPUs torch writes the block's sizes over the names of others in its C++ that begin alike (ks1, ks15), and what
    # comes of it doesn't compile, or does and is wrong. Code for fixed sizes names none.
    for_one_size = torch.compile(torch_flex.flex_attention, dynamic=False, **options)

    def attend(q: "Tensor", *args: Any, **kwargs: Any) -> Any:
        return (for_one_size if q.device.type == "cpu" else for_any_size)(q, *args, **kwargs)

    lse_options: dict[str, Any] = {}
    if requirements.needs_lse:
        has_aux = "return_aux" in inspect.signature(torch_flex.flex_attention).parameters
        lse_options = {"return_aux": torch_flex.AuxRequest(lse=True)} if has_aux else {"return_lse": True}
    return bound(requirements, attend, lse_options)


def bound(requirements: AttentionRequirements, attend: Any, lse_options: dict[str, Any]) -> AttentionFn:
    """The kernel that calls `attend`, which is torch's flex_attention, compiled or not."""
    import torch

    from safelight.attention.masks import clear_blind, clear_blind_packed, empty_result, full_mask, is_empty

    needs_lse = requirements.needs_lse
    is_grouped = requirements.num_heads != requirements.num_kv_heads

    def flex(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        queries, keys = q.shape[1], k.shape[1]
        if queries == 0 or keys == 0:
            return empty_result(q, with_lse=needs_lse)
        is_packed = layout is not None and layout.offsets is not None
        # As it is for the rows with nothing to attend to; spread out, which copies nothing, for the kernel.
        hidden = None if mask is None else full_mask(mask, causal=causal, queries=queries, keys=keys, device=q.device)
        if mask is not None:
            mask = mask[:, None, None, :] if mask.ndim == 2 else mask
            mask = mask.expand(q.shape[0], q.shape[2], queries, keys)
        if layout is not None and is_packed:
            assert mask is None, "packed documents take no mask"
            change = _within_documents(layout, queries, keys, causal, q.device)
        else:
            change = _by_mask(mask, torch.tensor(keys - queries, device=q.device) if causal else None)
        result = attend(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=change,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            enable_gqa=is_grouped,
            **lse_options,
        )
        out, aux = result if needs_lse else (result, None)
        out = out.transpose(1, 2)
        lse: Tensor | None = None if aux is None else getattr(aux, "lse", aux).contiguous()
        if hidden is not None:
            nothing = is_empty(hidden)[..., 0]
            out = out.masked_fill(nothing.transpose(1, 2)[..., None], 0)
            lse = None if lse is None else lse.masked_fill(nothing, -torch.inf)
        elif layout is not None and is_packed:
            clear_blind_packed(out, lse, layout, causal=causal)
        else:
            clear_blind(out, lse, keys, causal=causal)
        return (out, lse) if needs_lse else out

    return flex


def _by_mask(mask: "Tensor | None", distance: "Tensor | None") -> Any:
    """What is done to a score: the mask [B, H, S, T], and causal where the last query is `distance` behind its key."""
    import torch

    if mask is None and distance is None:
        return None
    is_bool = mask is not None and mask.dtype == torch.bool

    def change(score: "Tensor", b: "Tensor", h: "Tensor", query: "Tensor", key: "Tensor") -> "Tensor":
        if mask is not None and is_bool:
            score = torch.where(mask[b, h, query, key], score, -torch.inf)
        elif mask is not None:
            score = score + mask[b, h, query, key]
        if distance is not None:
            score = torch.where(query + distance >= key, score, -torch.inf)
        return score

    return change


def _within_documents(layout: Layout, queries: int, keys: int, causal: bool, device: Any) -> Any:
    """What is done to a score: a document's queries see its own keys, with causal aligned in each document."""
    import torch

    offsets = layout.offsets
    assert offsets is not None
    key_offsets = offsets if layout.key_offsets is None else layout.key_offsets
    document = torch.searchsorted(offsets[1:], torch.arange(queries, device=device), right=True)
    key_document = torch.searchsorted(key_offsets[1:], torch.arange(keys, device=device), right=True)
    # From a query's place in the packed row to the last key it sees.
    last = torch.arange(queries, device=device) + (key_offsets[1:] - offsets[1:])[document]

    def change(score: "Tensor", b: "Tensor", h: "Tensor", query: "Tensor", key: "Tensor") -> "Tensor":
        score = torch.where(document[query] == key_document[key], score, -torch.inf)
        return torch.where(last[query] >= key, score, -torch.inf) if causal else score

    return change


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """On a CPU it needs a C++ compiler, and has no LSE there; packed documents exclude a mask."""
    reasons = []
    if requirements.packed_varlen and requirements.mask != "none":
        reasons.append(Reason("capability", f"no packed varlen together with mask {requirements.mask}"))
    if machine.platform != "cpu":
        return tuple(reasons)
    if COMPILER not in machine.packages:
        reasons.append(Reason("package", "no C++ compiler was found to compile it with (install g++, or set CXX)"))
    if requirements.needs_lse:
        reasons.append(Reason("capability", "no LSE on cpu (torch doesn't compile it there)"))
    return tuple(reasons)


def takes(head_dim: int) -> bool:
    """16 to 256: below it the compiled kernel has no tiles, above it they don't fit."""
    return 16 <= head_dim <= 256


BACKEND = AttentionBackend(
    name="flex",
    summary="torch's FlexAttention, compiled at the first call",
    load=load,
    aliases=("flex_attn", "flex_attention"),
    # Not mps, npu and musa: torch doesn't compile it for them.
    platforms=frozenset({"cpu", "cuda", "rocm", "xpu"}),
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")},
    dtypes=frozenset({"float16", "bfloat16", "float32"}),
    head_dims=takes,
    head_dims_text="16 to 256",
    # Each is a function of positions that reads the mask's tensor; packed documents and causal are others.
    masks=frozenset({"none", "key_padding", "dense", "bias"}),
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
