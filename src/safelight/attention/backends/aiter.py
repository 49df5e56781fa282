"""aiter: the attention of AMD's AI Tensor Engine, for Instinct."""

from safelight.attention.backend import AttentionBackend, AttentionFn, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from aiter import flash_attn_func, flash_attn_varlen_func

    from safelight.attention.flash import flash_attention

    needs_lse = requirements.needs_lse
    options = {"return_lse": needs_lse}
    return flash_attention("aiter", flash_attn_func, flash_attn_varlen_func, needs_lse=needs_lse, options=options)


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
