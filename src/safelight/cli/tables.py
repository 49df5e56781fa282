"""Plain text for people: aligned columns, reasons that fit the line, and a machine in one line."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safelight.platforms.facts import MachineFacts

WIDTH = 100


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with their columns aligned at the left; the last column goes on below itself where it is too long."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(row[:-1], widths, strict=True))
        yield from wrapped(start, row[-1])


def wrapped(start: str, text: str) -> Iterator[str]:
    """A text behind the start of its line, in lines of WIDTH that begin where it does. A word is never cut."""
    # Not by textwrap's own indent: it would put the start on a line alone where the first word doesn't fit behind it.
    room = max(20, WIDTH - len(start))
    lines = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False) or [""]
    for line in lines:
        yield f"{printable(start)}{line}".rstrip()
        start = " " * len(start)


def printable(text: str) -> str:
    """Text from a file, unable to move a terminal's cursor or break a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, to three figures: "0.0123", "4.56", "1230"."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


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
    return printable(", ".join(parts))
