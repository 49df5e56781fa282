"""CUDA: NVIDIA's GPUs, through a torch build that names a CUDA version."""

from typing import Any

from safelight.platforms.facts import MachineFacts
from safelight.platforms.spec import Platform, ask_devices, call, version_of

# Equality, never ">= sm90": FlashAttention-3 has code for Hopper alone, FlashAttention-4 for the sm100 family. Whether
# the installed flash2 has code for sm120 depends on its build: that is the backend's own arch test.
ORDERS = {
    "sm80": ("flash2", "sdpa"),
    "sm86": ("flash2", "sdpa"),
    "sm89": ("flash2", "sdpa"),
    "sm90": ("flash3", "flash2", "sdpa"),
    "sm100": ("flash4", "cudnn", "sdpa"),
    "sm103": ("flash4", "cudnn", "sdpa"),
    "sm120": ("flash2", "sdpa"),
    "sm121": ("flash2", "sdpa"),
}


def automatic_order(machine: MachineFacts) -> tuple[str, ...]:
    """The dense, exact kernels to try on this architecture, best first."""
    return ORDERS.get(machine.arch, ("sdpa",))


def default_dtype(machine: MachineFacts) -> str:
    """bfloat16 from sm80 on; older tensor cores have float16 only."""
    digits = machine.arch.removeprefix("sm")
    return "bfloat16" if digits.isdecimal() and int(digits) >= 80 else "float16"


def probe(torch: Any) -> MachineFacts | None:
    """Facts from torch.cuda. `driver_version` is the newest CUDA that the driver supports, as in "13.0"."""
    notes: list[str] = []
    # Vendor first: a ROCm build has torch.cuda too, and reports a compute capability.
    if version_of(torch, "version.hip") is not None:
        return None
    cuda_version = version_of(torch, "version.cuda")
    if cuda_version is None:
        if not call(torch, "cuda.is_available", notes):
            return None
        notes.append("torch.cuda reports a device, but this torch build names neither a CUDA nor a HIP version")
        return MachineFacts(platform="cuda", torch_version=version_of(torch, "__version__"), notes=tuple(notes))
    devices = ask_devices(torch, "cuda", _arch, notes)
    return MachineFacts(
        platform="cuda",
        devices=devices,
        torch_version=version_of(torch, "__version__"),
        cuda_version=cuda_version,
        driver_version=_driver_version(torch, notes),
        notes=tuple(notes),
    )


def _arch(cuda: Any, index: int) -> str:
    major, minor = cuda.get_device_capability(index)
    return f"sm{major}{minor}"


def _driver_version(torch: Any, notes: list[str]) -> str | None:
    # 12080 is CUDA 12.8; torch gives 0 where there is no driver.
    number = call(torch, "_C._cuda_getDriverVersion", notes)
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) and number > 0 else None


PLATFORM = Platform(
    name="cuda",
    torch_device="cuda",
    automatic_order=automatic_order,
    default_dtype=default_dtype,
    probe=probe,
    collectives="cpu:gloo,cuda:nccl",
)
