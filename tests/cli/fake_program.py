"""The whole program in a process of its own, with the fake engine; FAKE names what happens while it denoises."""

import contextlib
import ctypes
import hashlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safelight.cli.main import main


def sleep():
    time.sleep(0.05)


def print_everywhere():
    """What libraries do that mean no harm."""
    print("from print")
    print("from the first stdout", file=sys.__stdout__, flush=True)
    os.write(1, b"from a file descriptor\n")
    ctypes.CDLL(None).printf(b"from C, flushed when the process exits\n")
    subprocess.run(["echo", "from a child"], check=True)


def wait_for_child():
    subprocess.run(["sh", "-c", "echo waiting >&2; exec sleep 300"], check=True)


def compute():
    """One call that Python can't interrupt, as a big kernel is."""
    print("computing", file=sys.stderr, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)


def hold():
    """Cleaning up in a call that keeps every other thread from running, too."""
    try:
        time.sleep(60)
    finally:
        print("holding", file=sys.stderr, flush=True)
        sum(itertools.repeat(0, 10**10))


def swallow():
    """A library that takes the interruption for an error of its own, and goes on."""
    print("swallowing", file=sys.stderr, flush=True)
    with contextlib.suppress(BaseException):
        time.sleep(60)


def finalise():
    """A signal while a finaliser runs: Python drops what is raised there."""

    class Thing:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    Thing()


def write():
    """Stopped while a file is being written: the temporary one goes too."""
    with tempfile.NamedTemporaryFile(dir=Path(), suffix=".tmp") as file:
        file.write(b"partial")
        file.flush()
        print("writing", file=sys.stderr, flush=True)
        time.sleep(60)


def limit():
    """From here on a file can't grow beyond 1000 bytes: what a full disk does, in a process of its own."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def fail():
    raise ZeroDivisionError("our own mistake")


ACTIONS = {
    action.__name__: action
    for action in (sleep, print_everywhere, wait_for_child, compute, hold, swallow, finalise, write, limit, fail)
}


class Commands:
    """The commands, imported only when the program asks for them, as it does with its own."""

    def __iter__(self):
        print("started", file=sys.stderr, flush=True)
        from fake_engine import FakeEngine, commands_with

        return iter(commands_with(FakeEngine(during=ACTIONS.get(os.environ.get("FAKE", "")))))


if __name__ == "__main__":
    sys.exit(main(commands=Commands()))
