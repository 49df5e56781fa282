"""Ranks on this machine: started together, watched, and ended together, with the error of the one that failed first.

The program that a person started becomes the parent of a process per rank and waits for them. A socket leads to each:
the rank tells over it where it is and which error ended it, and ends itself when the socket is closed, so that no rank
outlives the parent, however that ends. Torch's own launcher waits half a minute for a rank that hangs, and leaves with
one exit status for everything; this one doesn't. Imports no torch.
"""

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from safelight.config import Launch
from safelight.errors import RankEndedError, RankError, RequestError, SafelightError, error_from_json
from safelight.request import Progress

# After a failure: how long the others may take to tell theirs, of which one may be the cause; and how long one may take
# to end that has said nothing while others have lost it, as a process does that leaves a device or writes a core file.
SETTLE_S = 1.0
LOST_S = 5.0
# How long a rank that is asked to end may take before it is killed; a person who pressed Ctrl-C waits for it too.
END_S = 1.2
POLL_S = 0.1

# What a rank runs: the same program, which finds its modules where the parent does.
_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from safelight.cli.main import main
sys.exit(main(says_why=False))
"""


class Channel:
    """A rank's end of the socket to its parent. While it is open, this process ends with the parent.

    `meeting` is the file where ranks find each other; its folder goes with the parent too.
    """

    def __init__(self, descriptor: int, meeting: str | None = None) -> None:
        os.set_inheritable(descriptor, False)
        self._meeting = meeting
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        threading.Thread(target=self._end_with_parent, name="parent", daemon=True).start()

    def tell(self, kind: str, value: dict[str, Any]) -> None:
        """Send the parent a "progress" or an "error", as plain data."""
        line = json.dumps({kind: value}, default=str) + "\n"
        with self._lock, contextlib.suppress(OSError):  # without a parent the process is about to end
            self._socket.sendall(line.encode())

    def _end_with_parent(self) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(1):
                pass
        if self._meeting is not None:
            shutil.rmtree(Path(self._meeting).parent, ignore_errors=True)
        os._exit(1)


@dataclass
class _Rank:
    """A rank as its parent sees it."""

    number: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    unread: bytes = b""
    where: str = ""
    error: SafelightError | None = None
    status: int | None = None
    failed_s: float = math.inf

    @property
    def has_failed(self) -> bool:
        """Whether it told an error, or ended with one."""
        return self.error is not None or bool(self.status)

    @property
    def has_lost_another(self) -> bool:
        """Whether its error comes from another rank's."""
        return isinstance(self.error, RankError)

    def read(self) -> bool:
        """Take in what the rank told; whether more may come."""
        try:
            received = self.channel.recv(1 << 16)
        except OSError:
            received = b""
        *lines, self.unread = (self.unread + received).split(b"\n")
        for told in map(json.loads, lines):
            if "progress" in told:
                progress = Progress.from_json(told["progress"])
                steps = f" {progress.step}/{progress.num_steps}" if progress.num_steps > 1 else ""
                self.where = f" in {progress.stage}{steps}"
            else:
                self.error = error_from_json(told["error"])
        return bool(received)


def run_ranks(arguments: Sequence[str], num_ranks: int, *, out: TextIO, stdin: bytes = b"") -> None:
    """Run the `safelight` program with these arguments on so many ranks, and wait until all have ended.

    The first rank writes to `out`, each reads `stdin`. Raises the error of the rank that failed first; RankEndedError
    where it couldn't tell one. Whatever this raises, no rank is left.
    """
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="safelight-ranks-", ignore_cleanup_errors=True) as folder:
        try:
            for number in range(num_ranks):
                ranks.append(_started(number, num_ranks, arguments, folder, out, stdin))
            error = _watch(ranks)
        finally:
            _end(ranks)
    if error is not None:
        raise error


def _started(number: int, num_ranks: int, arguments: Sequence[str], folder: str, out: TextIO, stdin: bytes) -> _Rank:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    launch = Launch(
        rank=number,
        local_rank=number,
        num_ranks=num_ranks,
        meeting=str(Path(folder) / "meeting"),
        channel=theirs.fileno(),
    )
    paths = json.dumps([path for path in sys.path if isinstance(path, str)])
    with theirs, tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, paths, *arguments],
            stdin=given,
            stdout=out if number == 0 else subprocess.DEVNULL,
            env=launch.environment(max(1, _num_cores() // num_ranks)),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # signals go through the parent, and to what a rank has started too
        )
    return _Rank(number=number, process=process, channel=ours)


def _num_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS hasn't
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _watch(ranks: Sequence[_Rank]) -> SafelightError | None:
    """Wait until all have ended, or one has failed and the others have had time to say so; gives the cause."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.channel, selectors.EVENT_READ, rank)
        while any(rank.status is None for rank in ranks):
            for key, _ in _selected(selector):
                if not key.data.read():
                    selector.unregister(key.fileobj)
            now_s = time.monotonic()
            for rank in ranks:
                rank.status = rank.process.poll()
                if rank.has_failed:
                    rank.failed_s = min(rank.failed_s, now_s)
            failed = [rank for rank in ranks if rank.has_failed]
            if failed:
                is_known = any(not rank.has_lost_another for rank in failed)
                first_s = min(rank.failed_s for rank in failed)
                if now_s >= first_s + (SETTLE_S if is_known else LOST_S):
                    break
        for key, _ in _selected(selector):  # what came with the end
            while key.data.read():
                pass
    return _cause(ranks)


def _selected(selector: selectors.BaseSelector) -> "list[tuple[selectors.SelectorKey, int]]":
    if not selector.get_map():
        time.sleep(POLL_S)
        return []
    return selector.select(POLL_S)


def _cause(ranks: Sequence[_Rank]) -> SafelightError | None:
    """The error that the others' come from: of those that a rank told, or of how one ended, the first."""
    in_time = sorted(ranks, key=lambda rank: rank.failed_s)
    errors = [rank.error for rank in in_time if rank.error is not None]
    for rank in in_time:
        if rank.error is not None and not rank.has_lost_another:
            if not isinstance(rank.error, RequestError):  # which is the same on all, and says where where it isn't
                rank.error.message = f"rank {rank.number}{rank.where}: {rank.error.message}"
            return rank.error
        # Without a word, and early: the others have lost it.
        if rank.error is None and (rank.status or (rank.status == 0 and errors)):
            how, hint = _how_it_ended(rank.status)
            text = f"rank {rank.number} {how}{rank.where}{hint}"
            return RankEndedError(text, rank=rank.number, status=rank.status)
    if not errors:
        return None
    silent = [rank for rank in ranks if rank.error is None]
    if not silent:
        errors[0].message += "; no rank has ended by itself, so that more time may help: --rank-timeout"
        return errors[0]
    names = " and ".join(f"rank {rank.number}{rank.where}" for rank in silent)
    message = f"no answer from {names}; it hangs, or needs more time than --rank-timeout: {errors[0].message}"
    return RankEndedError(message, rank=silent[0].number, status=None)


# Who sends a signal, where it isn't the program itself.
_SENDERS = {
    "SIGKILL": ", which a system sends that is out of memory",
    "SIGABRT": ", which a device's collectives send where another rank hangs longer than --rank-timeout",
}


def _how_it_ended(status: int) -> tuple[str, str]:
    """What became of a rank, and what a person may not know of it."""
    if status >= 0:
        return f"ended with exit status {status}", ""
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"died with {name}", _SENDERS.get(name, "")


def _end(ranks: Sequence[_Rank]) -> None:
    """Ask those that still run to end, and kill what doesn't."""
    for rank in _running(ranks):
        _signal(rank, signal.SIGTERM)
    limit_s = time.monotonic() + END_S
    while any(True for _ in _running(ranks)) and time.monotonic() < limit_s:
        time.sleep(POLL_S / 2)
    for rank in ranks:
        if rank.process.returncode != 0:
            _signal(rank, signal.SIGKILL)  # and what it has started, which may outlive it
        rank.process.wait()
        rank.channel.close()


def _running(ranks: Sequence[_Rank]) -> Iterator[_Rank]:
    return (rank for rank in ranks if rank.process.poll() is None)


def _signal(rank: _Rank, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, signum)
