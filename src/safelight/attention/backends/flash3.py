"""flash3: FlashAttention-3, for Hopper."""

from safelight.attention.backend import AttentionBackend, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 256."""
    return head_dim % 8 == 0 and head_dim <= 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """LSE only from a release whose parameters say how to ask for it."""
    # Older ones always return it or never do, and nothing else tells those two apart.
    package = machine.packages.get("flash_attn_3")
    if not requirements.needs_lse or package is None or package.import_error is not None:
        return ()
    if package.parameters is None:
        return (Reason("capability", "no LSE that is known of (the facts lack this release's parameters)"),)
    if "return_attn_probs" not in package.parameters:
        return (Reason("capability", "no LSE (this release has no parameter return_attn_probs)"),)
    return ()


BACKEND = AttentionBackend(
    name="flash3",
    summary="FlashAttention-3 (flash-attn-3), for Hopper",
    load=None,
    aliases=("fa3", "flash_3", "flash_attn_3", "flash_attention_3", "_flash_3", "_flash_varlen_3"),
    # On ROCm the package hands its calls on to another library. Neither a compute capability nor a CUDA version is
    # asked: sm90 alone. Some builds have code for sm80 too, and nothing but their build's log says which.
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm90",)},
    package=Package(
        key="flash_attn_3",
        dists=("flash-attn-3",),
        remedy="build it from the folder hopper/ of flash-attention's sources: pip install . --no-build-isolation",
        module="flash_attn_interface",
        function="flash_attn_func",
    ),
    head_dims=takes,
    head_dims_text="multiples of 8 up to 256",
    # No key_padding, as with flash2.
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
