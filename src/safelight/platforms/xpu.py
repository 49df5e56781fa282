"""XPU: Intel's GPUs, through a torch build for them."""

import re
from typing import Any

from safelight.platforms.facts import MachineFacts
from safelight.platforms.spec import Platform, ask_devices, call, look, version_of

# The first two parts of a device's `version` in torch.xpu, which is the GPU's IP version ("20.1.0" on a B580), and the
# family that has it, as Intel's compilers call it: DG2 (Alchemist), Ponte Vecchio, Meteor, Arrow, Battlemage, Lunar and
# Panther Lake.
FAMILIES = {
    (12, 55): "acm-g10",
    (12, 56): "acm-g11",
    (12, 57): "acm-g12",
    (12, 60): "pvc",
    (12, 61): "pvc-vg",
    (12, 70): "mtl-u",
    (12, 71): "mtl-h",
    (12, 74): "arl-h",
    (20, 1): "bmg-g21",
    (20, 2): "bmg-g31",
    (20, 4): "lnl-m",
    (30, 0): "ptl-h",
    (30, 1): "ptl-u",
}
FIRST_IP_VERSION = 12  # what is smaller is the version of an older driver's interface


def automatic_order(machine: MachineFacts) -> tuple[str, ...]:
    """The dense, exact kernels to try, best first."""
    return ("xpu_flash", "sdpa")


def default_dtype(machine: MachineFacts) -> str:
    """bfloat16 where there are matrix engines; Meteor Lake's graphics have none and emulate it."""
    return "float16" if machine.arch.startswith("xpu-mtl") else "bfloat16"


def probe(torch: Any) -> MachineFacts | None:
    """Facts from torch.xpu, which every torch has. `driver_version` is the first device's, as in "1.6.35096+9"."""
    notes: list[str] = []
    is_built = version_of(torch, "version.xpu") is not None or call(torch, "xpu._is_compiled", notes)
    if not is_built and not notes:
        return None
    devices = ask_devices(torch, "xpu", _arch, notes)
    return MachineFacts(
        platform="xpu",
        devices=devices,
        torch_version=version_of(torch, "__version__"),
        driver_version=_driver_version(torch, notes) if devices else None,
        notes=tuple(notes),
    )


def _arch(xpu: Any, index: int) -> str:
    version = re.match(r"(\d+)\.(\d+)\.\d+", str(look(xpu.get_device_properties(index), "version")))
    if version is None or int(version[1]) < FIRST_IP_VERSION:
        return "xpu"
    family = (int(version[1]), int(version[2]))
    return f"xpu-{FAMILIES.get(family, f'{family[0]}.{family[1]}')}"


def _driver_version(torch: Any, notes: list[str]) -> str | None:
    # Asked apart from the devices, so that its absence costs only itself.
    properties = call(torch, "xpu.get_device_properties", notes)
    return version_of(properties, "driver_version")


PLATFORM = Platform(
    name="xpu",
    torch_device="xpu",
    automatic_order=automatic_order,
    default_dtype=default_dtype,
    probe=probe,
    collectives="cpu:gloo,xpu:xccl",
)
