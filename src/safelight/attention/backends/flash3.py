"""flash3: FlashAttention-3, for Hopper."""

from collections.abc import Mapping

from safelight.attention.backend import AttentionBackend, AttentionFn, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts, PackageFacts
from safelight.platforms.packages import Installed, Package

FORWARD_ONLY = "fa3-fwd"
FORWARD_ONLY_HEAD_DIMS = (64, 96, 128, 192, 256)


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from safelight.attention.flash import flash_attention

    try:
        from flash_attn_interface import flash_attn_func, flash_attn_varlen_func
    except ModuleNotFoundError as error:
        if error.name != "flash_attn_interface":
            raise
        # The same functions, in the distribution that counts where flash-attn-3 isn't installed.
        from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func

    needs_lse = requirements.needs_lse
    # The first releases always return (out, lse), those after them out alone, and neither can be asked; the newest
    # return what they are asked for.
    options = {"return_attn_probs": True} if needs_lse else {}
    return flash_attention("flash3", flash_attn_func, flash_attn_varlen_func, needs_lse=needs_lse, options=options)


def variant(installed: Installed, env: Mapping[str, str]) -> str | None:
    """fa3-fwd is a smaller build of the same kernels, from somebody else; None is the package itself."""
    return FORWARD_ONLY if installed.dist.lower().replace("_", "-") == FORWARD_ONLY else None


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 256."""
    return head_dim % 8 == 0 and head_dim <= 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """LSE only from a release whose parameters say how to ask for it; fa3-fwd has less of everything."""
    package = machine.packages.get("flash_attn_3")
    if package is None or package.import_error is not None:
        return ()
    reasons = _of_the_smaller_build(requirements, machine) if package.variant == FORWARD_ONLY else ()
    return (*reasons, *_without_lse(package)) if requirements.needs_lse else reasons


def _without_lse(package: PackageFacts) -> tuple[Reason, ...]:
    # Older releases always return it or never do, and nothing else tells those two apart.
    if package.parameters is None:
        return (Reason("capability", "no LSE that is known of (the facts lack this release's parameters)"),)
    if "return_attn_probs" not in package.parameters:
        return (Reason("capability", "no LSE (this release has no parameter return_attn_probs)"),)
    return ()


def _of_the_smaller_build(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    reasons = []
    if (machine.cuda_version or "").partition(".")[0] != "13":
        found = "none" if machine.cuda_version is None else machine.cuda_version
        reasons.append(Reason("package", f"{FORWARD_ONLY} needs a torch built for CUDA 13, this one's CUDA is {found}"))
    # What the declaration itself refuses isn't said twice.
    if requirements.dtype == "float16":
        reasons.append(Reason("capability", f"no dtype float16 ({FORWARD_ONLY} is built for bfloat16 alone)"))
    if takes(requirements.head_dim) and requirements.head_dim not in FORWARD_ONLY_HEAD_DIMS:
        sizes = ", ".join(map(str, FORWARD_ONLY_HEAD_DIMS))
        reasons.append(
            Reason("capability", f"no head_dim {requirements.head_dim} ({FORWARD_ONLY} is built for {sizes})")
        )
    return tuple(reasons)


BACKEND = AttentionBackend(
    name="flash3",
    summary="FlashAttention-3 (flash-attn-3, or fa3-fwd), for Hopper",
    load=load,
    aliases=("fa3", "flash_3", "flash_attn_3", "flash_attention_3", "_flash_3", "_flash_varlen_3"),
    # On ROCm the package hands its calls on to another library. Neither a compute capability nor a CUDA version is
    # asked: sm90 alone. Some builds have code for sm80 too, and nothing but their build's log says which.
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm90",)},
    package=Package(
        key="flash_attn_3",
        dists=("flash-attn-3", FORWARD_ONLY),
        remedy="build it from the folder hopper/ of flash-attention's sources: pip install . --no-build-isolation",
        module="flash_attn_interface",
        modules={FORWARD_ONLY: "fa3_fwd_interface"},
        function="flash_attn_func",
        variant=variant,
    ),
    head_dims=takes,
    head_dims_text="multiples of 8 up to 256",
    # No key_padding, as with flash2.
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
