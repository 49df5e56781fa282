"""Where a command writes: results to standard output alone, everything else to standard error."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from safelight.request import CancelToken


@dataclass(frozen=True, kw_only=True)
class Console:
    """`out` takes the result, `err` progress, logs and errors. `cancel` is set when the program is asked to stop."""

    out: TextIO
    err: TextIO
    cancel: CancelToken


@contextlib.contextmanager
def open_console(cancel: CancelToken, *, owns_process: bool) -> Iterator[Console]:
    """A console whose `out` nothing else can reach: what libraries print meanwhile, also from C, goes to stderr.

    A process of its own keeps it so to the end, because C libraries flush what they printed when the process exits;
    otherwise standard output is put back.
    """
    with contextlib.ExitStack() as stack:
        sys.stdout.flush()
        result_fd = os.dup(1)
        os.dup2(2, 1)
        if not owns_process:
            spare_fd = os.dup(result_fd)
            stack.callback(os.close, spare_fd)
            stack.callback(os.dup2, spare_fd, 1)
        encoding = sys.stdout.encoding or "utf-8"
        out = stack.enter_context(open(result_fd, "w", encoding=encoding, errors="backslashreplace"))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield Console(out=out, err=sys.stderr, cancel=cancel)
            out.flush()
        except BrokenPipeError:
            with open(os.devnull, "w") as nothing:  # what is still buffered must not fail again on closing
                os.dup2(nothing.fileno(), result_fd)
            raise
