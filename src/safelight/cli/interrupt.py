"""Stopping on Ctrl-C, on a request to terminate, and when the terminal closes: at once, and without a traceback."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

GRACE_S = 2.0
# Waited for in slices: on a machine too busy to run us, this thread is late too, and clean-up gets its share of time.
GRACE_SLICES = 20

_REASONS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):  # Windows has none
    _REASONS[signal.SIGHUP] = "the terminal was closed"


class Interrupted(KeyboardInterrupt):
    """A signal asked the program to stop. It passes every `except Exception`, so that clean-up runs on the way out."""


class Interrupts:
    """While entered, a stopping signal ends the work: `with` swallows what unwinds, and `signum` says which it was.

    The first signal calls what `notify` was given and raises Interrupted in the main thread, wherever that is. A
    second one kills the process. Python runs a handler only between two of its instructions, and a library may lose
    the exception, so a thread watches as well: work that hasn't unwound after GRACE_S seconds is cut off. A signal
    that was ignored on entering stays ignored (`nohup`, jobs in the background). After a signal the process is
    expected to end; nothing is restored then.
    """

    def __init__(self, *, says_why: bool = True) -> None:
        self.signum: int | None = None
        self._signals = tuple(signum for signum in _REASONS if signal.getsignal(signum) is not signal.SIG_IGN)
        self._callbacks: list[Callable[[], None]] = []
        # One of several that are stopped together leaves it to another.
        self._has_announced = not says_why

    def notify(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when a signal comes."""
        self._callbacks.append(callback)

    def announce(self) -> None:
        """Say on stderr, once, why the program stops."""
        if not self._has_announced and self.signum is not None:
            self._has_announced = True
            print(f"safelight: {_REASONS[signal.Signals(self.signum)]}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="interrupts", daemon=True).start()
        self._previous = [signal.signal(signum, self._stop) for signum in self._signals]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self.signum is not None:
            return True
        for signum, handler in zip(self._signals, self._previous, strict=True):
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()  # ends the watching thread
        return False

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        for each in self._signals:
            signal.signal(each, signal.SIG_DFL)
        self.signum = signum
        # Raised inside a finaliser, the exception would be printed and dropped; the callbacks and the thread stay.
        sys.unraisablehook = lambda unraisable: None
        for callback in self._callbacks:
            callback()
        raise Interrupted

    def _watch(self, reader: socket.socket) -> None:
        with reader:
            received = reader.recv(1)
            while received and received[0] not in self._signals:
                received = reader.recv(1)
            if not received:
                return
            reader.settimeout(GRACE_S / GRACE_SLICES)
            for _ in range(GRACE_SLICES):
                with contextlib.suppress(TimeoutError):
                    reader.recv(1)
                    break  # a second signal: don't wait
        if not self._has_announced:
            line_break = "\n" if os.isatty(2) else ""  # a progress bar's line is still open
            os.write(2, f"{line_break}safelight: {_REASONS[signal.Signals(received[0])]}\n".encode())
        os._exit(128 + received[0])
