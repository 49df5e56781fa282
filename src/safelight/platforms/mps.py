"""MPS: the GPU of Apple silicon, through Metal."""

import platform
import re
from typing import Any

from safelight.platforms.facts import DeviceFacts, MachineFacts
from safelight.platforms.spec import Platform, call, version_of


def automatic_order(machine: MachineFacts) -> tuple[str, ...]:
    """Torch's own kernel is the only one."""
    return ("sdpa",)


def default_dtype(machine: MachineFacts) -> str:
    """bfloat16 where chip and system have it: M2 and later, macOS 14 and later; float16 where one is known to lack it.

    The M1 takes bfloat16 by converting, at a price; before macOS 14 Metal has no such type.
    """
    name = machine.devices[0].name if machine.devices else ""
    macos = re.match(r"\d+", machine.driver_version or "")
    lacks_it = re.match(r"Apple M1\b", name) or (macos is not None and int(macos[0]) < 14)
    return "float16" if lacks_it else "bfloat16"


def probe(torch: Any) -> MachineFacts | None:
    """Facts from torch.backends.mps. `driver_version` is the macOS version, since Metal comes with the system.

    `memory_bytes` is what Metal recommends to use of the memory that CPU and GPU share.
    """
    notes: list[str] = []
    if not call(torch, "backends.mps.is_built", notes):
        return None
    devices: tuple[DeviceFacts, ...] = ()
    if call(torch, "backends.mps.is_available", notes):
        name = call(torch, "backends.mps.get_name", notes)
        memory = call(torch, "mps.recommended_max_memory", notes)
        memory_bytes = memory if isinstance(memory, int) else None
        devices = (DeviceFacts(arch="mps", name=str(name or "Apple GPU"), memory_bytes=memory_bytes),)
    return MachineFacts(
        platform="mps",
        devices=devices,
        torch_version=version_of(torch, "__version__"),
        driver_version=platform.mac_ver()[0] or None,
        notes=tuple(notes),
    )


PLATFORM = Platform(
    name="mps",
    torch_device="mps",
    automatic_order=automatic_order,
    default_dtype=default_dtype,
    probe=probe,
)
