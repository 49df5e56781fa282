"""Progress on standard error: a bar on a terminal, a line now and then anywhere else."""

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from safelight.request import Progress

# Elsewhere than on a terminal a new line needs both: this much of the stage, and this long since the last line.
LINE_SHARE = 0.1
LINE_INTERVAL_S = 2.0


class ProgressDisplay(Protocol):
    """Takes Progress events; leaving its `with` block takes the bar off the screen."""

    def __call__(self, event: Progress) -> None:
        """Show where the request is."""

    def say(self, line: str) -> None:
        """Print a line without disturbing the bar."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def progress_on(stream: TextIO) -> ProgressDisplay:
    """The display that suits a stream. A terminal that doesn't say how wide it is has no room for a bar."""
    is_wide = stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    return ProgressBar(stream) if is_wide else ProgressLines(stream)


class ProgressLines:
    """A line when a stage starts, and while it lasts at most one for each tenth of it and every two seconds."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._stage = ""
        self._step = 0
        self._line_step = 0
        self._line_s = 0.0

    def __call__(self, event: Progress) -> None:
        """Print a line if one is due."""
        now_s = self._clock()
        is_new = event.stage != self._stage or event.step < self._step
        self._stage, self._step = event.stage, event.step
        has_moved = event.step - self._line_step >= LINE_SHARE * event.num_steps
        if is_new or (has_moved and now_s - self._line_s >= LINE_INTERVAL_S):
            self._line_step, self._line_s = event.step, now_s
            self.say(_line(event))

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class ProgressBar:
    """One bar that shows the stage, its steps and the time left, and is gone at the end."""

    def __init__(self, stream: TextIO) -> None:
        from tqdm import tqdm

        # tqdm would start a thread, and with some start methods of multiprocessing a process, for bars that get no
        # updates or are drawn by several processes. Ours are neither.
        tqdm.monitor_interval = 0
        tqdm.set_lock(threading.RLock())
        self._stage = ""
        self._bar: Any = tqdm(
            file=stream,
            total=1,
            leave=False,
            dynamic_ncols=True,
            bar_format="{desc} |{bar}| {n_fmt}/{total_fmt}{postfix}",
            delay=1e-9,  # nothing to draw before the first event
        )

    def __call__(self, event: Progress) -> None:
        """Move the bar."""
        bar = self._bar
        left = "" if event.remaining_s is None else f"{duration(event.remaining_s)} left"
        bar.set_postfix_str(left, refresh=False)
        is_at_border = event.stage != self._stage or event.step in (0, event.num_steps)
        if event.stage != self._stage:
            self._stage = event.stage
            bar.set_description_str(event.stage, refresh=False)
        bar.total = event.num_steps
        bar.update(event.step - bar.n)  # draws at most ten times a second
        if is_at_border:
            bar.refresh()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line, file=self._bar.fp)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()


def _line(event: Progress) -> str:
    """An event as "denoise 12/20, 8 s left": steps where there are several, the time where it is known."""
    steps = f" {event.step}/{event.num_steps}" if event.num_steps > 1 else ""
    left = "" if event.remaining_s is None else f", {duration(event.remaining_s)} left"
    return f"{event.stage}{steps}{left}"


def duration(seconds: float) -> str:
    """A time as people write it: "0.4 s", "12 s", "3 min 5 s", "2 h 10 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
