"""Progress: a bar on a terminal, and lines that stay few anywhere else."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest

from safelight.cli.progress import ProgressBar, ProgressLines, duration, progress_on
from safelight.request import Progress


@contextlib.contextmanager
def terminal(columns):
    """A terminal to write to, and a function that closes it and gives what it was sent."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    stream = os.fdopen(side, "w", encoding="utf-8")

    def sent():
        stream.write("<end>")
        stream.flush()
        data = b""
        while not data.endswith(b"<end>"):  # a terminal hands over what it has so far
            data += os.read(main, 100_000)
        return data.decode("utf-8").removesuffix("<end>").replace("\r\n", "\n")  # the line ends are its own

    with stream, os.fdopen(main, "rb"):
        yield stream, sent


def event(stage, step=1, num_steps=1, remaining_s=None):
    return Progress(stage=stage, step=step, num_steps=num_steps, elapsed_s=0.0, remaining_s=remaining_s)


def lines_of(timed_events):
    """The lines that a run gives: pairs of the clock's time and an event."""
    stream = io.StringIO()
    times = iter([now_s for now_s, _ in timed_events])
    with ProgressLines(stream, clock=lambda: next(times)) as display:
        for _, each in timed_events:
            display(each)
    return stream.getvalue().splitlines()


def test_each_stage_is_one_line_when_it_is_quick():
    stages = [event("load", 0), event("load"), event("encode"), event("denoise", 0, 20)]
    steps = [event("denoise", step, 20, remaining_s=1.0) for step in range(1, 21)]
    rest = [event("decode"), event("write")]
    events = [(index / 100, each) for index, each in enumerate([*stages, *steps, *rest])]
    assert lines_of(events) == ["load", "encode", "denoise 0/20", "decode", "write"]


def test_a_slow_stage_gives_at_most_ten_more_lines():
    events = [(60.0 * step, event("denoise", step, 1000, remaining_s=60.0 * (1000 - step))) for step in range(1001)]
    lines = lines_of(events)
    assert lines[0] == "denoise 0/1000, 16 h 40 min left"
    assert lines[1:4] == [
        f"denoise {step}/1000, {left} left"
        for step, left in ((100, "15 h 0 min"), (200, "13 h 20 min"), (300, "11 h 40 min"))
    ]
    assert len(lines) == 11


def test_a_stage_of_few_steps_waits_two_seconds_for_its_next_line():
    events = [(0.7 * step, event("denoise", step, 4)) for step in range(5)]
    assert lines_of(events) == ["denoise 0/4", "denoise 3/4"]


def test_a_stage_that_starts_again_is_told_again():
    events = [(0.0, event("denoise", step, 2)) for step in (0, 1, 2, 0, 1, 2)]
    assert lines_of(events) == ["denoise 0/2", "denoise 0/2"]


def test_the_bar_shows_stage_steps_and_time_left_and_is_gone_at_the_end():
    with terminal(columns=60) as (stream, sent):
        with progress_on(stream) as display:
            assert isinstance(display, ProgressBar)
            display(event("load", 0))
            display(event("denoise", 0, 20))
            display.say("transformer: self x6 sdpa (platform default)")
            display(event("denoise", 20, 20, remaining_s=0.0))
            display(event("decode", 0, 1, remaining_s=75))
        text = sent()
    screens = text.split("\r")
    assert max(map(len, screens)) <= 60
    shown = [re.sub(r"\|.*\|", "|", screen).strip() for screen in screens if screen.strip()]
    assert "load | 0/1" in shown
    assert "denoise | 0/20" in shown
    assert "denoise | 20/20, 0.0 s left" in shown
    assert "decode | 0/1, 1 min 15 s left" in shown
    assert "transformer: self x6 sdpa (platform default)\n" in text
    assert screens[-1].strip() == ""
    assert "\n" not in text.replace("default)\n", "")


def test_a_terminal_of_unknown_width_gets_lines():
    with terminal(columns=0) as (stream, sent):
        with progress_on(stream) as display:
            display(event("load", 0))
        assert sent() == "load\n"


def test_elsewhere_than_on_a_terminal_there_is_no_bar():
    stream = io.StringIO()
    with progress_on(stream) as display:
        assert isinstance(display, ProgressLines)
        display(event("load"))
        display.say("a line")
    assert stream.getvalue() == "load\na line\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (185, "3 min 5 s"),
        (3599.6, "1 h 0 min"),
        (7805, "2 h 10 min"),
    ],
)
def test_durations_read_as_people_write_them(seconds, text):
    assert duration(seconds) == text
