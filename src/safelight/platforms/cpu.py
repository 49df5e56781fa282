"""CPU: always there, and what a run uses where no accelerator is."""

import os
import platform
import shutil
from pathlib import Path
from typing import Any

from safelight.config import environment_switches
from safelight.platforms.facts import DeviceFacts, MachineFacts, PackageFacts
from safelight.platforms.spec import Platform, call, version_of

ARM = ("arm64", "aarch64")
COMPILERS = ("g++", "clang++")


def automatic_order(machine: MachineFacts) -> tuple[str, ...]:
    """Torch's own kernel is the only one."""
    return ("sdpa",)


def default_dtype(machine: MachineFacts) -> str:
    """float32: half precision is far slower than float32 on most CPUs."""
    return "float32"


def probe(torch: Any) -> MachineFacts:
    """Facts from torch and the operating system; there is always one device."""
    notes: list[str] = []
    return MachineFacts(
        platform="cpu",
        devices=(DeviceFacts(arch=_arch(torch, notes), name=_name(), memory_bytes=_memory_bytes()),),
        torch_version=version_of(torch, "__version__"),
        packages=_compiler(),
        notes=tuple(notes),
    )


def _compiler() -> dict[str, PackageFacts]:
    """The C++ compiler that torch would compile kernels with, as the fact "cxx": the variable CXX, else a usual one."""
    wanted = environment_switches(("CXX",)).get("CXX")
    found = [name for name in ((wanted,) if wanted else COMPILERS) if shutil.which(name)]
    return {"cxx": PackageFacts(dist=Path(found[0]).name)} if found else {}


def _arch(torch: Any, notes: list[str]) -> str:
    """The instructions that torch's kernels use here, which may be fewer than the processor has."""
    capability = call(torch, "backends.cpu.get_cpu_capability", notes)
    if capability == "AVX512":
        # Private and newer than the rest: a torch without it has no AMX kernels to speak of.
        return "cpu-amx" if call(torch, "cpu._is_amx_tile_supported", notes) else "cpu-avx512"
    if capability == "AVX2":
        return "cpu-avx2"
    return "cpu-neon" if platform.machine() in ARM else "cpu"


def _name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or "CPU"


def _memory_bytes() -> int | None:
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf, and a system may not know these names
        return None
    return pages * page_bytes if pages > 0 and page_bytes > 0 else None


PLATFORM = Platform(
    name="cpu",
    torch_device="cpu",
    automatic_order=automatic_order,
    default_dtype=default_dtype,
    probe=probe,
)
