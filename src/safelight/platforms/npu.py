"""NPU: Huawei's Ascend, through the plug-in torch_npu, which torch loads by itself."""

import re
from typing import Any

from safelight.platforms.facts import MachineFacts
from safelight.platforms.spec import Platform, ask_devices, has_namespace, plug_in, unloaded, version_of

# The name that CANN gives a chip, as torch_npu passes it on, and our name for its family. Ascend910B1 to B4 are Atlas
# A2; 910_93xx is sold as 910C (Atlas A3); 910_95xx is the name that the Ascend 950 had before it was out.
FAMILIES = (
    (r"Ascend910B", "ascend910b"),
    (r"Ascend910_93", "ascend910c"),
    (r"Ascend(950|910_95)", "ascend950"),
    (r"Ascend310P", "ascend310p"),
)
HAS_BFLOAT16 = ("ascend910b", "ascend910c", "ascend950")


def automatic_order(machine: MachineFacts) -> tuple[str, ...]:
    """The dense, exact kernels to try, best first."""
    return ("ascend", "sdpa")


def default_dtype(machine: MachineFacts) -> str:
    """bfloat16 from the 910B on; the first 910 and the 310P have float16 only."""
    return "bfloat16" if machine.arch in HAS_BFLOAT16 else "float16"


def probe(torch: Any) -> MachineFacts | None:
    """Facts from torch.npu. Of CANN and the driver torch tells no version."""
    notes: list[str] = []
    version = version_of(torch, "__version__")
    if not has_namespace(torch, "npu", notes):
        plugin = plug_in("torch_npu")
        if not notes and plugin is not None:
            notes.append(unloaded(plugin))
        return MachineFacts(platform="npu", torch_version=version, notes=tuple(notes)) if notes else None
    devices = ask_devices(torch, "npu", _arch, notes)
    return MachineFacts(platform="npu", devices=devices, torch_version=version, notes=tuple(notes))


def _arch(npu: Any, index: int) -> str:
    name: str = npu.get_device_name(index)
    for pattern, family in FAMILIES:
        if re.match(pattern, name):
            return family
    return name.lower()


PLATFORM = Platform(
    name="npu",
    torch_device="npu",
    automatic_order=automatic_order,
    default_dtype=default_dtype,
    probe=probe,
    collectives="cpu:gloo,npu:hccl",
)
