"""aiter: the attention of AMD's AI Tensor Engine, for Instinct."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from aiter import flash_attn_func, flash_attn_varlen_func

    from safelight.attention.masks import clear_blind, clear_blind_packed, empty_result, with_dense_features

    needs_lse = requirements.needs_lse

    def aiter_flash(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        assert mask is None, "aiter takes no mask"
        if q.shape[1] == 0 or k.shape[1] == 0:
            return empty_result(q, with_lse=needs_lse)
        q, k, v = with_dense_features(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        options = {"softmax_scale": scale, "causal": causal, "return_lse": needs_lse}
        lse = None
        if layout is None or layout.offsets is None:
            out = flash_attn_func(q, k, v, **options)
            if needs_lse:
                out, lse = out
            clear_blind(out, lse, k.shape[1], causal=causal)
        else:
            longest, longest_keys = layout.longest
            # By name: its order isn't flash-attn's.
            out = flash_attn_varlen_func(
                q[0],
                k[0],
                v[0],
                cu_seqlens_q=layout.offsets,
                cu_seqlens_k=layout.offsets if layout.key_offsets is None else layout.key_offsets,
                max_seqlen_q=longest,
                max_seqlen_k=longest_keys,
                **options,
            )
            if needs_lse:
                out, lse = out
                lse = lse[None]
            out = out[None]
            clear_blind_packed(out, lse, layout, causal=causal)
        return (out, lse) if needs_lse else out

    return aiter_flash


def takes(head_dim: int) -> bool:
    """Up to 256; the package pads to a multiple of 8 itself."""
    return head_dim <= 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """The switch that sends every call to another kernel: what runs wouldn't be what the plan says."""
    if machine.env.get("ENABLE_CK") == "0":
        return (Reason("package", "ENABLE_CK=0 in the environment sends its calls to Triton kernels"),)
    return ()


BACKEND = AttentionBackend(
    name="aiter",
    summary="AMD's AI Tensor Engine for ROCm (amd-aiter)",
    load=load,
    aliases=("amd_aiter", "aiter_fa", "aiter_flash", "rocm_aiter_fa"),
    platforms=frozenset({"rocm"}),
    # A binary without code for the device ends the process, so that no other architecture is tried on a guess.
    arches={"rocm": ("gfx942", "gfx950")},
    package=Package(
        key="amd_aiter",
        dists=("amd-aiter", "aiter"),
        remedy="pip install amd-aiter, or build AMD's aiter from its sources",
        # Another package, which has nothing to do with attention, is called aiter too.
        owns="aiter/ops/mha.py",
        module="aiter",
        function="flash_attn_func",
        min_version="0.1.5",
    ),
    head_dims=takes,
    head_dims_text="up to 256",
    # No bias: its own is one [queries, keys] for every head and row. No key_padding, as with flash2.
    packed_varlen=True,
    lse=True,
    env=("ENABLE_CK",),
    why_not=why_not,
)
