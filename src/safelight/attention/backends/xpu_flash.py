"""xpu_flash: flash attention for Intel's GPUs, from vLLM's kernels for them."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIMS = (64, 96, 128, 192, 256)
# Where a kernel isn't compiled in, the package calls attention in Python instead, with all scores in memory.
NOT_COMPILED = {(96, True): "with causal", (192, False): "without causal"}


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements; ImportError where its binary can't be used."""
    import torch
    from vllm_xpu_kernels import flash_attn_interface as vendor

    from safelight.attention.flash import flash_attention

    if not vendor.FA2_AVAILABLE:
        raise ImportError(f"vllm_xpu_kernels has no flash attention here: {vendor.FA2_UNAVAILABLE_REASON}")
    flash_attn_varlen_func = vendor.flash_attn_varlen_func

    def dense(q: "Tensor", k: "Tensor", v: "Tensor", **options: Any) -> "Tensor":
        # It knows packed documents alone: each row of the batch becomes one.
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        out: Tensor = flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            cu_seqlens_q=torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=q.device),
            cu_seqlens_k=torch.arange(0, batch * keys + 1, keys, dtype=torch.int32, device=q.device),
            max_seqlen_q=queries,
            max_seqlen_k=keys,
            **options,
        )
        return out.view(batch, queries, *out.shape[1:])

    return flash_attention("xpu_flash", dense, flash_attn_varlen_func, needs_lse=False)


def takes(head_dim: int) -> bool:
    """The sizes it is compiled for."""
    return head_dim in HEAD_DIMS


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """Two of its sizes are compiled with causal alone, or without it alone."""
    how = NOT_COMPILED.get((requirements.head_dim, requirements.causal))
    if how is None:
        return ()
    return (Reason("capability", f"no head_dim {requirements.head_dim} {how} (its wheels have no such kernel)"),)


BACKEND = AttentionBackend(
    name="xpu_flash",
    summary="flash attention for Intel's GPUs (vllm-xpu-kernels)",
    load=load,
    aliases=("xpu_fa", "xpu_attn", "xpu_flash_attn"),
    platforms=frozenset({"xpu"}),
    # Ponte Vecchio and Xe2.
    arches={"xpu": ("xpu-pvc", "xpu-pvc-vg", "xpu-bmg-g21", "xpu-bmg-g31", "xpu-lnl-m")},
    package=Package(
        key="xpu_flash",
        dists=("vllm-xpu-kernels",),
        remedy="pip install vllm-xpu-kernels, in the release made for the installed torch",
        module="vllm_xpu_kernels.flash_attn_interface",
        function="flash_attn_varlen_func",
        flag="FA2_AVAILABLE",
        flag_reason="FA2_UNAVAILABLE_REASON",
        # Which kernels are compiled in differs from release to release; this is the one whose are known.
        min_version="0.1.16.2",
    ),
    head_dims=takes,
    head_dims_text=", ".join(map(str, HEAD_DIMS)),
    # No LSE: the base of its logarithm hasn't been seen on a device, and its shape has changed between releases.
    # No key_padding, as with flash2.
    packed_varlen=True,
    why_not=why_not,
)
