"""MUSA: Moore Threads' GPUs, through the plug-in torch_musa."""

import importlib
import re
from typing import Any

from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package, probe_packages
from safelight.platforms.spec import Platform, ask, ask_devices, has_namespace, plug_in, unloaded, version_of

TORCH_MUSA = Package(
    key="torch_musa",
    dists=("torch_musa",),
    remedy="install torch_musa in the release made for the installed torch",
    module="torch_musa",
)
FIRST_WITH_BFLOAT16 = 22  # the MTT S4000's generation, which Moore Threads ports code for sm80 to


def automatic_order(machine: MachineFacts) -> tuple[str, ...]:
    """The dense, exact kernels to try, best first."""
    return ("mate", "sdpa")


def default_dtype(machine: MachineFacts) -> str:
    """bfloat16 from the MTT S4000 (mp22) on."""
    number = re.fullmatch(r"musa-mp(\d+)", machine.arch)
    return "bfloat16" if number is not None and int(number[1]) >= FIRST_WITH_BFLOAT16 else "float16"


def probe(torch: Any) -> MachineFacts | None:
    """Facts from torch.musa.

    Torch loads torch_musa by itself since torch_musa says so in its entry points. An older one that is installed is
    imported here: without that its devices don't exist.
    """
    notes: list[str] = []
    version = version_of(torch, "__version__")
    is_there = has_namespace(torch, "musa", notes)
    if not is_there and not notes:
        _import_older(notes)
        is_there = has_namespace(torch, "musa", notes)
    if not is_there:
        return MachineFacts(platform="musa", torch_version=version, notes=tuple(notes)) if notes else None
    devices = ask_devices(torch, "musa", _arch, notes)
    return MachineFacts(platform="musa", devices=devices, torch_version=version, notes=tuple(notes))


def _import_older(notes: list[str]) -> None:
    plugin = plug_in("torch_musa")
    if plugin is not None and plugin.is_autoloaded:
        notes.append(unloaded(plugin))
    elif plugin is not None:
        # In a process of its own first: a binary that doesn't fit this torch may end the one that imports it.
        trial = probe_packages([TORCH_MUSA], {})[TORCH_MUSA.key]
        if trial.import_error is not None:
            notes.append(f"importing torch_musa failed: {trial.import_error}")
        else:
            ask("importing torch_musa", lambda: importlib.import_module("torch_musa"), notes)


def _arch(musa: Any, index: int) -> str:
    # The MTT S5000 has capability (3, 1); Moore Threads' compiler calls that mp_31.
    major, minor = musa.get_device_capability(index)
    return f"musa-mp{major}{minor}"


PLATFORM = Platform(
    name="musa",
    torch_device="musa",
    automatic_order=automatic_order,
    default_dtype=default_dtype,
    probe=probe,
    collectives="cpu:gloo,musa:mccl",
)
