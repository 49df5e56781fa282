"""`generate` on several ranks, as a person starts it: one voice, one file, and an end whatever happens to a rank."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from safelight.config import Launch
from safelight.errors import RequestError
from safelight.media import read_metadata
from tests.rules.source import ROOT
from tests.unit.media_results import decoded as frames_of

FAULT = Path(__file__).parent / "fault"
# What a failed run may take to end, after the failure.
LIMIT_S = 10.0
SMALL = ("--size", "64x64", "--frames", "5", "--steps", "4", "--seed", "5")
COMMAND = (sys.executable, "-m", "safelight", "generate", "a red circle")


def environment(fault=""):
    found = {name: value for name, value in os.environ.items() if not name.startswith("SAFELIGHT_")}
    found["PYTHONPATH"] = os.pathsep.join([str(FAULT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**found, **({"FAULT": fault} if fault else {})}


def start(folder, *arguments, fault="", command=COMMAND):
    return subprocess.Popen(
        [*command, *SMALL, *arguments],
        cwd=folder,
        env=environment(fault),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, *arguments, **how):
    process = start(folder, *arguments, **how)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def ranks_in(folder):
    """The processes that work in a folder, by their numbers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(folder) and b"RANK=" in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def happened_at(err):
    """When the fault says that it happened, in seconds since the epoch."""
    return next(float(line.split()[-1]) for line in err.splitlines() if line.startswith("fault at"))


def all_gone(folder):
    limit_s = time.monotonic() + LIMIT_S
    while ranks_in(folder):
        assert time.monotonic() < limit_s, "a rank is left"
        time.sleep(0.1)
    return True


def assert_the_same(frames, expected):
    """Frames before the encoding differ by a rounding at most (test_engine_gloo.py); what is lossy widens that."""
    difference = np.abs(frames.astype(int) - expected.astype(int))
    assert difference.mean() < 0.5 and difference.max() <= 16, (difference.mean(), difference.max())


needs_proc = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="ranks are found in /proc, which Linux has")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The video of one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(folder, "--out", "alone.mp4")[0] == 0
    return frames_of(folder / "alone.mp4")


@pytest.mark.slow
@pytest.mark.parametrize("grid", [("--ulysses", "2"), ("--ring", "2", "--cfg-parallel", "2")])
def test_ranks_that_generate_starts_make_the_same_file_and_the_first_alone_speaks(grid, alone, tmp_path) -> None:
    status, out, err = run(tmp_path, *grid, "--out", "clip.mp4", "--json")
    assert status == 0, err
    assert json.loads(out)["plan"]["grid"]["cfg"] == (2 if "--cfg-parallel" in grid else 1)
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]
    assert read_metadata(tmp_path / "clip.mp4")["request"]["seed"] == 5
    assert_the_same(frames_of(tmp_path / "clip.mp4"), alone)
    assert err.count("denoise 0/4") == 1


TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *("-m", "safelight", "generate", "a red circle"),
)


@pytest.mark.slow
def test_torchrun_starts_them_too(alone, tmp_path) -> None:
    status, out, err = run(tmp_path, "--ring", "2", "--out", "clip.mp4", command=TORCHRUN)
    assert status == 0, err
    assert out.count("clip.mp4") == 1
    assert_the_same(frames_of(tmp_path / "clip.mp4"), alone)


def nodes(folder, *of_each):
    """Status, standard output and standard error of two nodes, each of a rank that torchrun starts on its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    meeting = ("--master-addr=127.0.0.1", f"--master-port={port}")
    started = []
    for i, arguments in enumerate(of_each):
        (folder / f"node{i}").mkdir()
        command = (*launcher, *meeting, f"--node-rank={i}", "-m", "safelight", "generate", "a red circle")
        started.append(start(folder / f"node{i}", "--ring", "2", *arguments, command=command))
    ended = [process.communicate(timeout=240) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]


@pytest.mark.slow
def test_two_nodes_make_the_same_file_on_the_first(alone, tmp_path) -> None:
    first, second = nodes(tmp_path, ("--out", "clip.mp4"), ("--out", "clip.mp4"))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "clip.mp4" in first[1] and second[1] == ""
    assert_the_same(frames_of(tmp_path / "node0" / "clip.mp4"), alone)
    assert list((tmp_path / "node1").iterdir()) == []


@pytest.mark.slow
def test_nodes_that_do_not_agree_are_told_once(tmp_path) -> None:
    first, second = nodes(tmp_path, ("--guidance", "3"), ("--guidance", "2"))
    assert first[0] != 0 and second[0] != 0
    assert (first[2] + second[2]).count(
        "the ranks don't agree: guidance_scale is 2.0 on rank 1 and 3.0 on rank 0;"
    ) == 1
    assert list((tmp_path / "node0").iterdir()) == list((tmp_path / "node1").iterdir()) == []


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("1 load 1 raise", 1, "safelight: error: rank 1 in load 1/3: planted"),
        ("1 denoise 2 raise", 1, "safelight: error: rank 1 in denoise 2/4: planted"),
        ("1 denoise 2 bug", 1, "safelight: error: rank 1 in denoise 2/4: LookupError: planted"),
        ("1 denoise 2 slow-bug", 1, "safelight: error: rank 1 in denoise 2/4: LookupError: planted"),
        ("1 denoise 2 slow-exit", 7, "safelight: error: rank 1 ended with exit status 7 in denoise 2/4"),
        ("1 denoise 2 exit", 7, "safelight: error: rank 1 ended with exit status 7 in denoise 2/4"),
        ("0 denoise 2 exit", 7, "safelight: error: rank 0 ended with exit status 7 in denoise 2/4"),
        (
            "1 denoise 3 kill",
            137,
            "rank 1 died with SIGKILL in denoise 3/4, which a system sends that is out of memory",
        ),
    ],
)
def test_dx_020_the_end_of_a_rank_is_the_end_of_all_with_its_own_error(fault, status, says, tmp_path) -> None:
    process = start(tmp_path, "--ulysses", "2", fault=fault)
    _, err = process.communicate(timeout=120)
    ended_s = time.time()
    assert process.returncode == status, err
    assert ended_s - happened_at(err) < LIMIT_S
    assert says in err
    assert err.count("safelight: error") == 1
    assert all_gone(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("fault", "says"), [("1 denoise 3 raise", "error on rank 1: planted"), ("1 denoise 3 kill", "SIGKILL")]
)
def test_dx_020_under_torchrun_too_nobody_waits_for_a_rank_that_has_ended(fault, says, tmp_path) -> None:
    process = start(tmp_path, "--ulysses", "2", fault=fault, command=TORCHRUN)
    _, err = process.communicate(timeout=120)
    ended_s = time.time()
    assert process.returncode == 1, err
    assert says in err
    assert ended_s - happened_at(err) < LIMIT_S
    assert all_gone(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_proc
def test_dx_020_a_rank_that_hangs_is_named_after_the_limit_that_was_asked_for(tmp_path) -> None:
    status, _, err = run(tmp_path, "--ulysses", "2", "--rank-timeout", "8", fault="1 denoise 2 hang")
    assert status == 1
    assert "no answer from rank 1 in denoise 2/4; it hangs, or needs more time than --rank-timeout" in err
    assert all_gone(tmp_path)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_dx_020_no_rank_is_left_when_the_program_is_stopped(signum, status, tmp_path, monkeypatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    process = start(tmp_path, "--ulysses", "2", fault="1 denoise 2 hang")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("denoise"):
            break
    assert len(ranks_in(tmp_path)) == 2
    started_s = time.monotonic()
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == status
    assert time.monotonic() - started_s < LIMIT_S
    assert all_gone(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert list((tmp_path / "temporary").glob("safelight*")) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ulysses", "3"), "transformer.self has 4 heads, which ulysses 3 doesn't divide; with 3 ranks these work: "),
        (("--ulysses", "8"), "with 8 ranks these work: ulysses 4 x ring 2, "),
        (("--ulysses", "0"), "--ulysses is 0; it must be a whole number of at least 1"),
        (("--ring=-1",), "--ring is -1; it must be a whole number of at least 1"),
        (("--ring", "2", "--rank-timeout", "1e20"), "--rank-timeout is 1e+20; give a number of seconds above 0, up to"),
        (("--ring", "200000"), "has 32 tokens for 200000 ranks; with 64 ranks these work: cfg_parallel 2 x ulysses 4"),
        (("--ring", "2", "--device", "cpu:1"), "'cpu:1' is one device, and 2 ranks take one each"),
    ],
)
def test_dx_035_what_does_not_divide_is_refused_before_anything_starts(arguments, says, tmp_path) -> None:
    status, _, err = run(tmp_path, *arguments)
    assert status == 2
    assert says in err
    assert "load" not in err


@pytest.mark.parametrize(("world", "grid"), [("2", "4"), ("8", "4"), ("4", "1")])
def test_dx_095_a_world_that_is_not_the_product_is_refused_with_the_formula(world, grid, tmp_path, monkeypatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    arguments = () if grid == "1" else ("--cfg-parallel", "2", "--ulysses", "2")
    status, _, err = run(tmp_path, *arguments)
    assert status == 2
    assert f"{world} processes were started" in err
    assert f"is a grid of {grid}; the product cfg_parallel x ring x ulysses must be {world}" in err
    assert "these work" not in err


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "x"}, "`RANK` is 'x'; a launcher sets whole numbers"),
        ({"MASTER_PORT": "abc"}, "`MASTER_PORT` is 'abc'; a launcher sets whole numbers"),
        ({"RANK": "2"}, "RANK=2, LOCAL_RANK=1, WORLD_SIZE=2, MASTER_PORT=29500 can't be a launcher's"),
        ({"SAFELIGHT_RANK": "{"}, "`SAFELIGHT_RANK` is Safelight's own"),
        ({"SAFELIGHT_RANK": '{"no": 1}'}, "`SAFELIGHT_RANK` is Safelight's own"),
    ],
)
def test_what_no_launcher_sets_is_refused(changed, says, tmp_path, monkeypatch) -> None:
    usual = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**usual, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=re.escape(says)):
        Launch.from_environment()


def test_dx_095_guidance_with_one_branch_is_not_split(tmp_path) -> None:
    status, _, err = run(tmp_path, "--cfg-parallel", "2", "--guidance", "1")
    assert status == 2
    assert (
        "transformer runs one guidance branch (a guidance scale above 1 makes two), which cfg_parallel 2 doesn't split"
        in err
    )
