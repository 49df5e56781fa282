"""Plain text for people: aligned columns, and a machine in one line."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safelight.platforms.facts import MachineFacts


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with their columns aligned at the left; the last column is as long as it likes."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def machine_line(machine: "MachineFacts") -> str:
    """A machine in one line: "rocm gfx942 (AMD Instinct MI300X), torch 2.13.0+rocm7.1, HIP 7.1"."""
    device = f" ({machine.devices[0].name})" if machine.devices else ", no device"
    several = f" x {len(machine.devices)}" if len(machine.devices) > 1 else ""
    parts = [f"{machine.platform} {machine.arch}{device}{several}"]
    versions = (
        ("torch", machine.torch_version),
        ("CUDA", machine.cuda_version),
        ("HIP", machine.hip_version),
        ("driver", machine.driver_version),
    )
    parts += [f"{what} {version}" for what, version in versions if version]
    return ", ".join(parts)
