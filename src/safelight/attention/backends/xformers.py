"""xformers: its memory-efficient attention, on CUDA up to Hopper."""

from safelight.attention.backend import AttentionBackend, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 256, which all of its operators take."""
    return head_dim % 8 == 0 and head_dim <= 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """It is given one bias: packed documents or a mask."""
    if requirements.packed_varlen and requirements.mask != "none":
        return (Reason("capability", f"no packed varlen together with mask {requirements.mask}"),)
    return ()


BACKEND = AttentionBackend(
    name="xformers",
    summary="xFormers' memory_efficient_attention",
    load=None,
    aliases=("xformers_attn", "memory_efficient_attention", "xformers_memory_efficient_attention"),
    # Its operators that take a mask end at sm90. Its operator for ROCm isn't declared: nobody has tried it here.
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90")},
    package=Package(
        key="xformers",
        dists=("xformers",),
        remedy="pip install xformers, in the release made for the installed torch",
        module="xformers.ops",
        function="memory_efficient_attention",
        min_version="0.0.29",
    ),
    head_dims=takes,
    head_dims_text="multiples of 8 up to 256",
    # Every mask becomes an additive one, and causal goes into it.
    masks=frozenset({"none", "key_padding", "dense", "bias"}),
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
