"""sage3: SageAttention 3, in 4 bits, for Blackwell."""

from typing import TYPE_CHECKING

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.attention.versions import is_at_least
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    import torch
    from sageattn3 import sageattn3_blackwell

    default_scale = requirements.head_dim**-0.5

    def sage3(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> "Tensor":
        assert mask is None and (layout is None or layout.offsets is None), (
            "sage3 takes neither mask nor packed documents"
        )
        assert scale is None or scale == default_scale, "sage3 has head_dim ** -0.5 built in"
        if q.shape[1] == 0 or k.shape[1] == 0:
            return torch.zeros_like(q, memory_format=torch.contiguous_format)
        # Heads first, side by side in memory; its own keys, since it subtracts their mean in place.
        q, v = (x.transpose(1, 2).contiguous() for x in (q, v))
        k = k.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        out: Tensor = sageattn3_blackwell(q, k, v, is_causal=causal)
        return out.transpose(1, 2)

    return sage3


def takes(head_dim: int) -> bool:
    """64 and 128."""
    return head_dim in (64, 128)


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """Causal needs equal lengths, and a build needs a CUDA that knows the device."""
    reasons = []
    if requirements.causal and requirements.role == "cross" and not requirements.equal_lengths:
        reasons.append(Reason("capability", "no causal with unequal lengths of queries and keys"))
    if machine.platform == "cuda" and is_at_least(machine.cuda_version, "12.8") is False:
        reasons.append(Reason("package", f"it can't be built for CUDA {machine.cuda_version}: 12.8 is the first"))
    return tuple(reasons)


BACKEND = AttentionBackend(
    name="sage3",
    summary="SageAttention 3 (sageattn3): 4-bit floating point, lossy",
    load=load,
    aliases=("sage_attn_3", "sage_attn_three", "sageattn3", "sageattn_3", "sage_attention_3", "sage_blackwell"),
    platforms=frozenset({"cuda"}),
    # A build has code for the one GPU it was built on; which, only an import and a call can tell.
    arches={"cuda": ("sm100", "sm120", "sm121")},
    package=Package(
        key="sageattn3",
        dists=("sageattn3",),
        remedy="build it from the folder sageattention3_blackwell/ of SageAttention's sources, with CUDA 12.8 or later",
        needs=("fp4attn_cuda", "triton"),
        module="sageattn3",
        function="sageattn3_blackwell",
    ),
    head_dims=takes,
    head_dims_text="64, 128",
    # Neither mask nor scale: the function takes both and ignores them.
    grouped_query=False,
    custom_scale=False,
    is_lossy=True,
    why_not=why_not,
)
