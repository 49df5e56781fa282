"""flash2: FlashAttention-2, on CUDA and on ROCm."""

from collections.abc import Mapping

from safelight.attention.backend import AttentionBackend, AttentionFn, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.attention.versions import is_at_least
from safelight.platforms.facts import MachineFacts, PackageFacts
from safelight.platforms.packages import Installed, Package

TRITON_SWITCH = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
INSTINCT = ("gfx90a", "gfx942", "gfx950")
RADEON = ("gfx11", "gfx120")
BLACKWELL = ("sm100", "sm103", "sm120", "sm121")


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    from safelight.attention.flash import flash_attention

    needs_lse = requirements.needs_lse
    # Its LSE comes with the probabilities alone, which it makes only where there is dropout.
    options = {"return_attn_probs": needs_lse}
    return flash_attention("flash2", flash_attn_func, flash_attn_varlen_func, needs_lse=needs_lse, options=options)


def variant(installed: Installed, env: Mapping[str, str]) -> str | None:
    """The Triton build is the same package under its own switch; None is the compiled one."""
    return "triton" if env.get(TRITON_SWITCH) == "TRUE" else None


def takes(head_dim: int) -> bool:
    """Up to 256; the package pads to a multiple of 8 itself."""
    return head_dim <= 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """What depends on the build: which GPUs it has code for."""
    package = machine.packages.get("flash_attn_2")
    is_triton = (package is not None and package.variant == "triton") or machine.env.get(TRITON_SWITCH) == "TRUE"
    if machine.platform == "rocm":
        return _on_rocm(machine.arch, is_triton)
    if machine.platform != "cuda" or package is None:
        return ()
    if is_triton:
        return (Reason("package", f"{TRITON_SWITCH}=TRUE makes it call its kernels for AMD; unset it"),)
    return _on_blackwell(package, machine) if machine.arch in BLACKWELL else ()


def _on_rocm(arch: str, is_triton: bool) -> tuple[Reason, ...]:
    if arch in INSTINCT or (is_triton and arch.startswith(RADEON)):
        return ()
    code = f"its {'Triton' if is_triton else 'compiled'} build has code for {', '.join(INSTINCT)}"
    if is_triton:
        code += " and Radeon's gfx11 and gfx120"
    elif arch.startswith(RADEON):
        code += f" (for Radeon, {TRITON_SWITCH}=TRUE switches to its Triton build)"
    return (Reason("arch", f"{code}, this device is {arch}"),)


def _on_blackwell(package: PackageFacts, machine: MachineFacts) -> tuple[Reason, ...]:
    # setup.py adds sm100 and sm120 where nvcc is 12.8 or later; the ready-made wheels have had such a nvcc since 2.8.0.
    # Their code runs on sm103 and sm121 as well. What can't be told is refused: such a call fails in the run.
    reasons = []
    if not is_at_least(package.version, "2.8.0"):
        reasons.append(
            f"flash-attn {package.version or '(version unknown)'} may lack code for {machine.arch}: 2.8.0 has it"
        )
    if not is_at_least(machine.cuda_version, "12.8"):
        cuda = machine.cuda_version or "(version unknown)"
        reasons.append(f"a build for CUDA {cuda} has no code for {machine.arch}: 12.8 is the first that can")
    return tuple(Reason("arch", reason) for reason in reasons)


BACKEND = AttentionBackend(
    name="flash2",
    summary="FlashAttention-2 (flash-attn)",
    load=load,
    aliases=(
        "fa",
        "fa2",
        "flash",
        "flash_attn",
        "flash_attn_2",
        "flash_attention",
        "flash_attention_2",
        "flash_varlen",
    ),
    platforms=frozenset({"cuda", "rocm"}),
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90", *BLACKWELL)},
    package=Package(
        key="flash_attn_2",
        dists=("flash-attn",),
        remedy="pip install flash-attn --no-build-isolation, with the torch it is to be used with already there",
        owns="flash_attn/flash_attn_interface.py",
        module="flash_attn",
        function="flash_attn_func",
        # The first whose LSE of packed documents is [heads, total].
        min_version="2.7.0",
        variant=variant,
    ),
    env=(TRITON_SWITCH,),
    head_dims=takes,
    head_dims_text="up to 256",
    # No key_padding: unpadding for the varlen function would wait for the device in every call, and with causal it
    # would align other keys. Padding at the end is cut or packed when the request is prepared.
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
