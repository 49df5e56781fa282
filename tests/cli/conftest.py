"""Fixtures of the command line's tests: the program in this process, and in one of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from safelight.cli.main import main
from tests.cli.fake_engine import FakeEngine, commands_with


@dataclass(frozen=True)
class Ran:
    """What a run of the program gave."""

    status: int
    out: str
    err: str


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def safelight(engine, capfd, tmp_path, monkeypatch):
    """Run the program here with the fake engine, in an empty directory and without settings from outside."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SAFELIGHT_")]:
        monkeypatch.delenv(name)

    def run(*arguments):
        capfd.readouterr()
        status = main(list(arguments), commands=commands_with(engine))
        return Ran(status, *capfd.readouterr())

    return run


@pytest.fixture
def start(tmp_path):
    """Start the program with the fake engine in a process of its own, in an empty directory; `fake` says what happens.

    A process that still runs at the test's end is killed, with its children.
    """
    started = []

    def start(*arguments, fake="", hangup=signal.SIG_DFL, **options):
        # A process started in the background of a script inherits ignored signals, as pytest may have been.
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        previous_hangup = signal.signal(signal.SIGHUP, hangup)
        try:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("fake_program.py")), *arguments],
                cwd=tmp_path,
                env={**os.environ, "FAKE": fake},
                start_new_session=True,
                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
            )
        finally:
            signal.signal(signal.SIGINT, previous)
            signal.signal(signal.SIGHUP, previous_hangup)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
