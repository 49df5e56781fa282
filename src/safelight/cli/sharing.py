"""`explain` on several ranks: how they share a request, and what each of them sends."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from safelight.cli import choices
from safelight.cli.tables import table, wrapped
from safelight.errors import CheckpointError, RequestError
from safelight.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from safelight.attention.grid import Grid
    from safelight.attention.volume import StepVolume
    from safelight.planning import Sharing
    from safelight.platforms.facts import MachineFacts

# What says how large the work is, which a plan of one process doesn't depend on.
OPTIONS = (choices.SIZE, choices.FRAMES, choices.GUIDANCE, choices.GUIDANCE_2)


def sharing_in(
    given: Mapping[str, Any], model: str | None, grid: "Grid", problems: list[str]
) -> "Callable[[str], Sharing] | None":
    """What gives how the ranks share a request in a dtype; None for a single one, and where something is wrong.

    What is wrong is the verdict of `generate` on the same model, grid and request, and ends up among the problems.
    """
    from safelight.planning import sharing_of

    if grid.num_ranks == 1:
        beside = [option.flag for option in OPTIONS if given[option.key] is not None]
        if beside:
            problems.append(
                f"{', '.join(beside)} can be given where ranks share the work; give --ulysses, --ring or "
                "--cfg-parallel too, or leave it out"
            )
        return None
    width, height = given["size"] or (None, None)
    try:
        request = Request(
            prompt="-",
            width=width,
            height=height,
            num_frames=given["frames"],
            guidance_scale=given["guidance"],
            guidance_scale_2=given["guidance_2"],
        )
        return sharing_of(model, request, grid)
    except CheckpointError:
        if not problems:
            raise
    except RequestError as error:
        problems.extend(choices.by_flag(error))
    return None


def too_few(grid: "Grid", machine: "MachineFacts") -> tuple[str, ...]:
    """A note where a machine has fewer devices than there are ranks."""
    from safelight.platforms import platform_named

    num_devices = len(machine.devices)
    if platform_named(machine.platform).torch_device == "cpu" or grid.num_ranks <= num_devices:
        return ()
    devices = f"{num_devices} device{'s' * (num_devices != 1)}"
    return (f"{grid.num_ranks} ranks take a device each; this machine has {devices}, so several such are needed",)


def sharing_lines(sharing: "Sharing", grid: "Grid") -> Iterator[str]:
    """The tokens of each rank and the bytes that it sends, for people."""
    request = sharing.request
    frames = f"{request.num_frames} frame{'s' * (request.num_frames != 1)}"
    guidance = f"guidance {request.guidance_scale:.10g}"
    for volume in sharing.volumes:
        branches = "1 guidance branch" if volume.rows == 1 else f"each of {volume.rows} guidance branches"
        yield ""
        yield from wrapped(
            f"{volume.component}  ",
            f"{request.width}x{request.height}, {frames}, {guidance}: {sum(volume.tokens)} tokens; "
            f"a rank has {tokens_per_rank(volume.tokens)} of {branches}",
        )
        yield from table([("a rank sends", "Ulysses", "ring", "a call", "calls", "a step"), *_rows(volume, grid)])


def _rows(volume: "StepVolume", grid: "Grid") -> Iterator[tuple[str, ...]]:
    for call in volume.calls:
        by = (num_bytes(call.ulysses_bytes), num_bytes(call.ring_bytes), num_bytes(call.total_bytes))
        yield (call.role, *by, str(call.count), num_bytes(call.count * call.total_bytes))
    if grid.num_shards > 1:
        yield ("output", "", "", num_bytes(volume.output_bytes), "1", num_bytes(volume.output_bytes))
    if grid.cfg > 1:
        yield ("other branch", "", "", num_bytes(volume.branch_bytes), "1", num_bytes(volume.branch_bytes))
    yield ("in all", "", "", "", "", num_bytes(volume.total_bytes))


def tokens_per_rank(tokens: tuple[int, ...]) -> str:
    """The slices of the ranks: "12", or "13 or 12" where they aren't even."""
    return " or ".join(str(length) for length in sorted(set(tokens), reverse=True))


def num_bytes(count: int) -> str:
    """A number of bytes to three figures, in powers of 1000: "0", "512 B", "4.56 MB", "123 GB"."""
    if count == 0:
        return "0"
    size, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
