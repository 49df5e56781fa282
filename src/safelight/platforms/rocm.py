"""ROCm: AMD's Instinct and Radeon GPUs, through a torch build that names a HIP version.

Torch calls its devices "cuda".
"""

from typing import Any

from safelight.platforms.facts import MachineFacts
from safelight.platforms.spec import Platform, ask_devices, version_of

RADEON = ("gfx10", "gfx11", "gfx120")
HAS_BFLOAT16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def automatic_order(machine: MachineFacts) -> tuple[str, ...]:
    """The dense, exact kernels to try on this architecture, best first."""
    if machine.arch in ("gfx942", "gfx950"):
        return ("aiter", "flash2", "sdpa")
    if machine.arch == "gfx90a":
        return ("flash2", "sdpa")
    if machine.arch.startswith(RADEON) and _flash2_is_triton(machine):
        return ("flash2", "sdpa")
    return ("sdpa",)


def _flash2_is_triton(machine: MachineFacts) -> bool:
    # flash-attn's other ROCm build (Composable Kernel) has code for Instinct only.
    package = machine.packages.get("flash_attn_2")
    return package is not None and package.variant == "triton"


def default_dtype(machine: MachineFacts) -> str:
    """bfloat16 on CDNA and from RDNA 3 on; older ones have float16 only."""
    return "bfloat16" if machine.arch.startswith(HAS_BFLOAT16) else "float16"


def probe(torch: Any) -> MachineFacts | None:
    """Facts from torch.cuda as a HIP build fills it. Nothing but torch is asked: no amdsmi, no rocminfo."""
    hip_version = version_of(torch, "version.hip")
    if hip_version is None:
        return None
    notes: list[str] = []
    devices = ask_devices(torch, "cuda", _arch, notes)
    return MachineFacts(
        platform="rocm",
        devices=devices,
        torch_version=version_of(torch, "__version__"),
        hip_version=hip_version,
        notes=tuple(notes),
    )


def _arch(cuda: Any, index: int) -> str:
    # "gfx942:sramecc+:xnack-": the rest are switches of the same code. The "compute capability" says nothing here.
    name: str = cuda.get_device_properties(index).gcnArchName
    return name.partition(":")[0]


PLATFORM = Platform(
    name="rocm",
    torch_device="cuda",
    automatic_order=automatic_order,
    default_dtype=default_dtype,
    probe=probe,
    # RCCL under torch's name for it.
    collectives="cpu:gloo,cuda:nccl",
)
