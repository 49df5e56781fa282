"""Verification (`doctor --verify`): usable backends on their contract's cases, each in processes of its own.

A kernel that was built for another machine may end the process that calls it, and one that reached into foreign memory
leaves a device behind on which nothing works any more: neither may stand in the way of the other backends. Each dtype
has its process, for kernels that are compiled have a limit of forms in one.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self, TextIO

from safelight.attention.backend import AttentionBackend, AttentionFn
from safelight.attention.cases import DTYPES, Case, cases
from safelight.attention.requirements import AttentionRequirements
from safelight.attention.select import by_name, found_backends, why_not
from safelight.catalog import BROKEN, cause_of
from safelight.platforms.facts import MachineFacts

if TYPE_CHECKING:
    from safelight.attention.contract import Finding

# How long a case may take, of which compiling takes most. A kernel that hangs is told as that, and the others go on.
CASE_S = 300.0
# What is looked at unless somebody says otherwise: what models run in.
USUAL_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a backend did on one case.

    `error` and `tolerance` are those of the contract's Finding, None where there was no result to compare; `problem`
    says what was wrong, None if nothing was.
    """

    case: str
    dtype: str
    error: float | None
    tolerance: float | None
    seconds: float
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How a backend did on all its cases: the answers, how many cases there are, and what ended a process too early."""

    backend: str
    num_cases: int
    answers: tuple[Answer, ...]
    end: str | None = None

    @property
    def failures(self) -> tuple[Answer, ...]:
        """The answers that aren't as they should be."""
        return tuple(answer for answer in self.answers if answer.problem is not None)

    @property
    def has_passed(self) -> bool:
        """Whether there were cases, every one ran, and none failed."""
        return self.end is None and not self.failures and len(self.answers) == self.num_cases > 0

    def to_json(self) -> dict[str, Any]:
        """The verification as plain data."""
        return {
            "backend": self.backend,
            "passed": self.has_passed,
            "num_cases": self.num_cases,
            "num_failures": len(self.failures),
            "end": self.end,
            "cases": [answer.to_json() for answer in self.answers],
        }


def dtypes_of(backend: AttentionBackend, asked: Sequence[str] = ()) -> tuple[str, ...]:
    """The dtypes to look at: those asked for that the backend declares, by default the usual ones or else its own."""
    declared = [dtype for dtype in DTYPES if dtype in backend.dtypes]
    return tuple(dtype for dtype in asked or USUAL_DTYPES if dtype in declared) or tuple(() if asked else declared)


def cases_here(
    backend: AttentionBackend,
    machine: MachineFacts,
    backends: Mapping[str, AttentionBackend],
    dtypes: tuple[str, ...],
) -> tuple[Case, ...]:
    """The cases in those dtypes that selection doesn't refuse the backend on this machine."""
    return tuple(
        case
        for case in (cases(backend, dtypes) if dtypes else ())
        if not why_not(backend.name, case.requirements, machine, backends, is_explicit=True, runs_here=True)
    )


def verify_here(backend: AttentionBackend, asked: Sequence[Case], device: str) -> Iterator[Answer]:
    """Run cases in this process. What the kernel raises is its answer. Imports torch."""
    import torch

    from safelight.attention.contract import judge

    kernels: dict[AttentionRequirements, AttentionFn] = {}
    for case in asked:
        need = case.requirements
        try:
            if need not in kernels:
                assert backend.load is not None, f"{backend.name} has no adapter"
                kernels[need] = backend.load(need)
            found = judge(kernels[need], case, device=device, is_lossy=backend.is_lossy)
        except (MemoryError, torch.OutOfMemoryError) as error:
            yield _without_result(case, f"out of memory: {cause_of(error)}")
        except BROKEN as error:
            yield _without_result(
                case, f"raised {cause_of(error)}" if need in kernels else f"can't be loaded: {cause_of(error)}"
            )
        else:
            yield _answer(found)


def verify(
    backend: AttentionBackend,
    machine: MachineFacts,
    backends: Mapping[str, AttentionBackend],
    *,
    dtypes: tuple[str, ...],
    device: str,
    report: Callable[[int, int], None] = lambda done, total: None,
    case_s: float = CASE_S,
) -> Verification:
    """Run the backend's cases on this machine's `device`, as torch calls it: in a process of its own for each dtype.

    `report` is told how many cases are done, and of how many. A process that ends before its last case, by a signal or
    an exit of the kernel's own, is the answer of the case that ran; so is one that takes longer than `case_s` seconds
    for it, which is ended.
    """
    asked = {dtype: cases_here(backend, machine, backends, (dtype,)) for dtype in dtypes}
    num_cases = sum(map(len, asked.values()))
    report(0, num_cases)
    answers: list[Answer] = []
    ends: list[str] = []
    for dtype, cases_asked in asked.items():
        if not cases_asked:
            continue
        order = {
            "paths": [path for path in sys.path if isinstance(path, str)],
            "backend": backend.name,
            "machine": machine.to_json(),
            "dtype": dtype,
            "device": device,
        }
        started = len(answers)
        with _process() as process:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # one that is gone already says so by its status
                process.stdin.write(json.dumps(order) + "\n")
            limit = _Limit(process, case_s)
            for line in process.stdout:
                limit.restart()
                answers.append(Answer.from_json(json.loads(line)))
                report(len(answers), num_cases)
            limit.cancel()
            status = process.wait()
        if len(answers) - started < len(cases_asked):
            end = f"took longer than {case_s:g} s for it" if limit.is_over else _how_it_ended(status)
            ends.append(f"the process {end}")
            answers.append(_without_result(cases_asked[len(answers) - started], ends[-1]))
    return Verification(
        backend=backend.name, num_cases=num_cases, answers=tuple(answers), end="; ".join(dict.fromkeys(ends)) or None
    )


@contextlib.contextmanager
def _process() -> "Iterator[subprocess.Popen[str]]":
    """This module as a program, in a session of its own, so that what a kernel starts (compilers, say) ends with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "safelight.attention.verify"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class _Limit:
    """Kills a process with all that it started, unless it is restarted in time."""

    def __init__(self, process: "subprocess.Popen[str]", seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self.is_over = False
        self._timer = self._started()

    def restart(self) -> None:
        """Give it the whole time anew."""
        self._timer.cancel()
        self._timer = self._started()

    def cancel(self) -> None:
        """Let it run."""
        self._timer.cancel()

    def _started(self) -> threading.Timer:
        timer = threading.Timer(self._seconds, self._end)
        timer.daemon = True
        timer.start()
        return timer

    def _end(self) -> None:
        self.is_over = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = ", as a system does that is out of memory" if name == "SIGKILL" else ""
    return f"died with {name}{hint}"


def _answer(found: "Finding") -> Answer:
    return Answer(
        case=found.case.name,
        dtype=found.case.requirements.dtype,
        error=found.error if math.isfinite(found.error) else None,
        tolerance=found.tolerance,
        seconds=found.seconds,
        problem=found.problem,
    )


def _without_result(case: Case, problem: str) -> Answer:
    return Answer(
        case=case.name, dtype=case.requirements.dtype, error=None, tolerance=None, seconds=0.0, problem=problem
    )


def _answer_order(text: str, out: TextIO) -> None:
    """What the process does: read the order, run its cases, write a line for each."""
    order = json.loads(text)
    sys.path[:] = order["paths"]
    backends = by_name(found_backends())
    backend, machine = backends[order["backend"]], MachineFacts.from_json(order["machine"])
    for answer in verify_here(backend, cases_here(backend, machine, backends, (order["dtype"],)), order["device"]):
        out.write(json.dumps(answer.to_json()) + "\n")
        out.flush()


if __name__ == "__main__":
    # Answers have a descriptor of their own; what a kernel's package prints goes to standard error, from C too.
    with open(os.dup(1), "w", encoding="utf-8") as answers_out:
        os.dup2(2, 1)
        _answer_order(sys.stdin.readline(), answers_out)
        answers_out.flush()
        os._exit(0)  # what a package does at the end of a process is no matter here
