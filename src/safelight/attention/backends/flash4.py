"""flash4: FlashAttention-4, compiled at the first call, for Hopper and the sm100 family."""

from safelight.attention.backend import AttentionBackend, AttentionFn, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    from safelight.attention.flash import flash_attention

    needs_lse = requirements.needs_lse
    # Both functions always return two values; the second is None unless it is asked for.
    options = {"return_lse": needs_lse}
    return flash_attention("flash4", flash_attn_func, flash_attn_varlen_func, needs_lse=needs_lse, options=options)


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 256, which Hopper's kernel takes."""
    return head_dim % 8 == 0 and head_dim <= 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """The sm100 family's kernel takes smaller heads."""
    # It has a separate kernel for 256, which isn't known to take everything else that is declared here.
    if machine.platform == "cuda" and machine.arch in ("sm100", "sm103") and 128 < requirements.head_dim <= 256:
        return (Reason("capability", f"no head_dim {requirements.head_dim} on {machine.arch} (takes up to 128 there)"),)
    return ()


BACKEND = AttentionBackend(
    name="flash4",
    summary="FlashAttention-4 (flash-attn-4), for Hopper and Blackwell's sm100 family",
    load=load,
    aliases=("fa4", "flash_4", "flash_attn_4", "flash_attention_4", "_flash_4"),
    # It has kernels for sm80 and sm120 as well, whose limits nothing checks: not until somebody has tried them.
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm90", "sm100", "sm103")},
    package=Package(
        key="flash_attn_4",
        dists=("flash-attn-4", "fa4"),
        remedy="pip install --pre flash-attn-4; where flash-attn is installed too, flash-attn-4 must come after it",
        # flash-attn brings a folder of this name, too, with an older file.
        owns="flash_attn/cute/interface.py",
        needs=("cutlass", "quack"),
        module="flash_attn.cute",
        function="flash_attn_func",
        # Betas differ in what they take and return; this is the oldest that the declaration was held to.
        min_version="4.0.0b36",
    ),
    head_dims=takes,
    head_dims_text="multiples of 8 up to 256",
    # No masks: it takes functions in its own language, not tensors. No key_padding, as with flash2.
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
