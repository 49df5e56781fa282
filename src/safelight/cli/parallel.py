"""What `--ulysses`, `--ring` and `--cfg-parallel` do: the grid, this process's place in it, and who speaks."""

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from safelight.cli import values
from safelight.cli.console import Console
from safelight.cli.options import CommandLine, Option
from safelight.cli.progress import ProgressDisplay, ProgressLines, progress_on
from safelight.config import Launch, Settings
from safelight.errors import AgreementError, GenerationError, RankError, RequestError, SafelightError
from safelight.request import Progress

if TYPE_CHECKING:
    from safelight.attention.grid import Grid
    from safelight.distributed.launch import Channel
    from safelight.distributed.mesh import Mesh

MOST_TIMEOUT_S = 1_000_000

ULYSSES = Option(
    flag="--ulysses",
    metavar="N",
    convert=values.whole,
    help="share the heads of attention among N devices (default: 1)",
    also=("--ulysses-degree", "--ulysses-size", "--sp", "--sp-size", "--sequence-parallel"),
)
RING = Option(
    flag="--ring",
    metavar="N",
    convert=values.whole,
    help="share the tokens of attention among N devices; with --ulysses among that many times as many (default: 1)",
    also=("--ring-degree", "--ring-size", "--context-parallel", "--cp"),
)
CFG_PARALLEL = Option(
    flag="--cfg-parallel",
    metavar="N",
    convert=values.whole,
    help="2 gives each of the two branches of guidance half of the devices (default: 1)",
    also=("--cfg-degree", "--cfg-size", "--use-cfg-parallel"),
)
RANK_TIMEOUT = Option(
    flag="--rank-timeout",
    metavar="SECONDS",
    convert=values.number,
    help="how long a rank may wait for another before the run ends (default: 300)",
    also=("--timeout", "--dist-timeout"),
)


def grid_of(given: Mapping[str, Any], problems: list[str]) -> "Grid":
    """The grid that is asked for; one rank where it is wrong, which ends up among the problems."""
    from safelight.attention.grid import Grid

    sizes = {key: 1 if given[key] is None else given[key] for key in ("ulysses", "ring", "cfg_parallel")}
    try:
        return Grid(ulysses=sizes["ulysses"], ring=sizes["ring"], cfg=sizes["cfg_parallel"])
    except RequestError as error:
        problems.extend(f"--{problem.replace('_', '-', 1)}" for problem in error.details["problems"])
        return Grid()


def launch_of(given: Mapping[str, Any], grid: "Grid", settings: Settings, problems: list[str]) -> Launch | None:
    """This process's place among ranks, None if it was started alone."""
    from safelight.attention.grid import FORMULA

    try:
        launch = Launch.from_environment()
    except RequestError as error:
        problems.append(error.message)
        return None
    num_ranks = grid.num_ranks if launch is None else launch.num_ranks
    if num_ranks != grid.num_ranks:
        problems.append(
            f"{num_ranks} process{'es were' if num_ranks > 1 else ' was'} started, and {grid} is a grid of "
            f"{grid.num_ranks}; the product {FORMULA} must be {num_ranks}"
        )
    timeout_s = given["rank_timeout"]
    if timeout_s is not None and not 0 < timeout_s <= MOST_TIMEOUT_S:
        problems.append(f"--rank-timeout is {timeout_s:g}; give a number of seconds above 0, up to {MOST_TIMEOUT_S}")
    if timeout_s is not None and num_ranks == 1:
        problems.append("--rank-timeout is for several ranks; give --ulysses, --ring or --cfg-parallel too")
    check_device(given["device"], settings, num_ranks, problems)
    return launch if num_ranks > 1 else None


def check_device(device: str | None, settings: Settings, num_ranks: int, problems: list[str]) -> None:
    """Tell where several ranks are to run on one device."""
    device = device or (settings.device.value if settings.device else "")
    if num_ranks > 1 and ":" in device:
        problems.append(f"device {device!r} is one device, and {num_ranks} ranks take one each; leave the number out")


def start_ranks(line: CommandLine, grid: "Grid", console: Console, *, seed: int, prompt: str) -> None:
    """Run this command line on ranks that are started here, all with the same seed. Raises what ended them."""
    from safelight.distributed.launch import run_ranks

    command, *rest = line.arguments
    if line.values["seed"] is None:
        rest = [f"--seed={seed}", *rest]
    run_ranks([command, *rest], grid.num_ranks, out=console.out, stdin=prompt.encode())


class Rank:
    """How this process takes part in a run: alone (`launch` None), or as a rank, of which the first one speaks."""

    def __init__(self, launch: Launch | None, console: Console) -> None:
        self.launch = launch
        self.is_first = launch is None or launch.rank == 0
        self._console = console
        self._channel: Channel | None = None
        if launch is not None and launch.channel is not None:
            from safelight.distributed import launch as launching

            self._channel = launching.Channel(launch.channel, launch.meeting)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """End this process on an error: its parent is told, or else a person; alone, the error just passes."""
        if self.launch is None:
            yield
            return
        try:
            yield
        except SafelightError as error:
            if self._channel is not None:
                self._channel.tell("error", error.to_json())
            elif self.is_first:
                raise
            # The first one tells what all raise; of a rank that is lost, itself has told, or its launcher does. A wrong
            # request is told once on each machine.
            elif not isinstance(error, AgreementError | RankError) and not (
                isinstance(error, RequestError) and self.launch.local_rank > 0
            ):
                print(f"safelight: error on rank {self.launch.rank}: {error.message}", file=self._console.err)
            raise SystemExit(error.exit_status) from error
        except Exception as error:
            # Told before this process unwinds, which may take longer than the others take to miss it.
            if self._channel is not None:
                from safelight.catalog import cause_of

                self._channel.tell("error", GenerationError(cause_of(error)).to_json())
            raise

    def progress(self) -> ProgressDisplay:
        """The display of this process, which tells the parent as well."""
        display = progress_on(self._console.err) if self.is_first else _Silent(self._console.err)
        return display if self._channel is None else _Told(display, self._channel)

    @contextlib.contextmanager
    def mesh(
        self, grid: "Grid", device: str | None, timeout_s: float | None
    ) -> "Iterator[tuple[Mesh | None, str | None]]":
        """The mesh with the other ranks, None if there are none, and the device to run on. Imports torch."""
        if self.launch is None:
            yield None, device
            return
        from safelight.distributed.mesh import TIMEOUT_S, joined_mesh, rank_device

        own, collectives = rank_device(device, self.launch.local_rank)
        timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        with joined_mesh(grid, self.launch, collectives=collectives, timeout_s=timeout_s) as mesh, self.telling():
            yield mesh, own


class _Silent(ProgressLines):
    """The display of a rank that doesn't speak."""

    def say(self, line: str) -> None:
        """Print nothing."""


class _Told:
    """A display that also tells the parent of a rank where it is."""

    def __init__(self, display: ProgressDisplay, channel: "Channel") -> None:
        self._display = display
        self._channel = channel

    def __call__(self, event: Progress) -> None:
        """Tell and show where the request is."""
        self._channel.tell("progress", event.to_json())
        self._display(event)

    def say(self, line: str) -> None:
        """Print a line."""
        self._display.say(line)

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._display.__exit__(kind, error, traceback)
