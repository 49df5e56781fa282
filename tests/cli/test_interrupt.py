"""DX-047: stopping at any moment, at once and cleanly: exit status, one line, no file, no child process."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STOPS = [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "the terminal was closed")]


def wait_for_line(process, line):
    """Read stderr until a line; everything up to it."""
    seen = []
    for text in process.stderr:
        seen.append(text)
        if text.startswith(line):
            return seen
    raise AssertionError(f"no line {line!r} in {seen}")


def members_of(group):
    """The processes of a process group: the program is started as a group of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def finish(process, limit_s=60):
    """Wait for the end: how long it took, and what was still printed."""
    start_s = time.monotonic()
    out, err = process.communicate(timeout=limit_s)
    return time.monotonic() - start_s, out, err


@pytest.mark.parametrize(("signum", "reason"), STOPS)
def test_dx_047_a_run_stops_at_once(start, tmp_path, signum, reason):
    process = start("generate", "a cat", "--steps", "1000", "--out", "cat.mp4", fake="sleep")
    wait_for_line(process, "denoise")
    process.send_signal(signum)
    took_s, out, err = finish(process)
    assert process.returncode == 128 + signum
    assert err.splitlines() == [f"safelight: {reason}"]
    assert out == ""
    assert took_s < 15  # all its steps take fifty seconds
    assert list(tmp_path.iterdir()) == []


def test_dx_047_a_run_stops_at_once_with_json(start):
    process = start("generate", "a cat", "--steps", "1000", "--json", fake="sleep")
    wait_for_line(process, "denoise")
    process.send_signal(signal.SIGINT)
    _, out, err = finish(process)
    assert (process.returncode, out, err) == (130, "", "safelight: interrupted\n")


def test_dx_047_no_child_is_left(start):
    process = start("generate", "a cat", fake="wait_for_child")
    wait_for_line(process, "waiting")
    time.sleep(0.5)  # Python forgets a child whose start is interrupted
    assert len(members_of(process.pid)) == 2
    os.kill(process.pid, signal.SIGINT)  # the parent alone, as `kill` does; a terminal would tell the child as well
    finish(process)
    assert process.returncode == 130
    assert members_of(process.pid) == []


@pytest.mark.parametrize("fake", ["compute", "swallow"])
def test_dx_047_what_does_not_unwind_is_cut_off(start, tmp_path, fake):
    process = start("generate", "a cat", "--steps", "1000", fake=fake)
    wait_for_line(process, {"compute": "computing", "swallow": "swallowing"}[fake])
    process.send_signal(signal.SIGINT)
    took_s, _, err = finish(process)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "safelight: interrupted"
    assert took_s < 30  # left alone, it takes minutes
    assert list(tmp_path.iterdir()) == []


def test_dx_047_an_interruption_that_python_drops_is_not_lost(start):
    process = start("generate", "a cat", "--steps", "1000", fake="finalise")
    _, _, err = finish(process)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "safelight: interrupted"
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("fake", ["compute", "hold"])
def test_dx_047_a_second_signal_kills(start, fake):
    process = start("generate", "a cat", fake=fake)
    wait_for_line(process, {"compute": "computing", "hold": "denoise"}[fake])
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    if fake == "hold":
        wait_for_line(process, "holding")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    took_s, _, err = finish(process)
    assert process.returncode in (130, -signal.SIGINT)  # a shell says 130 for both
    assert took_s < 1.5  # after a first signal, it would be cut off later than that
    assert "Traceback" not in err


def test_dx_047_a_file_that_is_being_written_is_removed(start, tmp_path):
    process = start("generate", "a cat", fake="write")
    wait_for_line(process, "writing")
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []


def test_dx_047_a_signal_that_was_ignored_stays_ignored(start, tmp_path):
    ignored = signal.SIG_IGN  # as `nohup` does
    process = start("generate", "a cat", "--steps", "4", "--out", "cat.mp4", fake="sleep", hangup=ignored)
    wait_for_line(process, "denoise")
    process.send_signal(signal.SIGHUP)
    finish(process)
    assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["cat.mp4"]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_dx_047_nothing_is_printed_but_the_reason_at_any_moment_of_the_start(start, tmp_path, share):
    # Before "started", while Python itself starts, an interruption is Python's to tell, and it shows a traceback.
    process = start("generate", "a cat", fake="sleep")
    wait_for_line(process, "started")
    begin_s = time.monotonic()
    wait_for_line(process, "denoise")
    starting_s = time.monotonic() - begin_s
    process.kill()

    process = start("generate", "a cat", "--steps", "1000", fake="sleep")
    wait_for_line(process, "started")
    time.sleep(share * starting_s)
    process.send_signal(signal.SIGINT)
    _, out, err = finish(process)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "safelight: interrupted"
    assert not re.search("Traceback|Exception|Error", err)
    assert out == ""
    assert list(tmp_path.iterdir()) == []
