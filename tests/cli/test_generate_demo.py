"""`safelight generate` with the demo model, from the command line to the file, each run a process of its own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import safelight
from safelight.media import probe_video, read_metadata

pytestmark = pytest.mark.slow

CHECKPOINT = Path(safelight.__file__).parent / "demo" / "checkpoint"
PROMPT = "a red circle moving right"
LIMIT_S = 120

# Ends like the installed program, and says on the way whether torch was needed.
PROGRAM = """
import sys
from safelight.cli.main import main
status = main()
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


@dataclass(frozen=True)
class Ran:
    """What a run gave; `err` without the last line, which `used_torch` holds."""

    status: int
    out: str
    err: str
    used_torch: bool


@pytest.fixture
def here(tmp_path):
    """An empty directory to run in."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture
def generate(here):
    def run(*arguments, **options):
        command = [sys.executable, "-c", PROGRAM, "generate", *arguments]
        ran = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=LIMIT_S, **options)
        err, _, used_torch = ran.stderr.rstrip("\n").rpartition("\n")
        return Ran(ran.returncode, ran.stdout, err, used_torch == "True")

    return run


@pytest.fixture
def start(here):
    """Start the program in a process group of its own; what still runs at the end is killed."""
    started = []

    def start(*arguments):
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored, as in a background job
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "generate", *arguments],
                cwd=here,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, previous)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the demo checkpoint, to be broken."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "checkpoint"))


def weights_of(checkpoint):
    """The transformer's weight file."""
    [path] = sorted((checkpoint / "transformer").glob("*.safetensors"))
    return path


def test_a_prompt_becomes_a_video(generate, here):
    ran = generate(PROMPT, "--seed", "7", "--json")
    assert ran.status == 0, ran.err
    document = json.loads(ran.out)
    assert list(document) == ["outputs", "plan", "request", "timings_s", "warnings", "model"]
    [output] = document["outputs"]
    assert list(output) == ["path", "seed", "width", "height", "num_frames", "fps"]
    assert output["seed"] == 7
    assert document["warnings"] == []
    assert document["timings_s"]["denoise"] > 0
    request = document["request"]
    assert (request["prompt"], request["seed"], request["num_outputs"]) == (PROMPT, 7, 1)
    unused = ("negative_prompt", "guidance_scale_2")  # it has one stage
    assert None not in {name: request[name] for name in request if name not in unused}.values()
    assert {layer["role"] for layer in document["plan"]["layers"]} >= {"self", "cross"}
    assert {layer["component"] for layer in document["plan"]["layers"]} >= {"transformer"}

    assert [path.name for path in here.iterdir()] == [output["path"]] == ["a-red-circle-moving-right-seed7.mp4"]
    facts = probe_video(here / output["path"])
    assert (facts.codec, facts.pix_fmt, facts.index_first) == ("h264", "yuv420p", True)
    assert (facts.width, facts.height) == (output["width"], output["height"]) == (request["width"], request["height"])
    assert facts.num_frames == output["num_frames"] == request["num_frames"]
    assert facts.fps == Fraction(request["fps"]) == output["fps"]
    inside = read_metadata(here / output["path"])
    assert inside["plan"] == document["plan"]
    assert inside["request"] == request


def test_the_plan_and_the_stages_are_told_on_standard_error(generate):
    ran = generate(PROMPT, "--seed", "7", "--steps", "2", "--out", "circle.mp4")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("circle.mp4  ")
    lines = ran.err.splitlines()
    stages = [line.split()[0] for line in lines if line.split()[0] in ("load", "encode", "denoise", "decode", "write")]
    assert list(dict.fromkeys(stages)) == ["load", "encode", "denoise", "decode", "write"]
    assert any(line.startswith("transformer: self x") for line in lines)
    assert "%|" not in ran.err  # no bar, and none of a library's


def test_dx_062_the_same_seed_gives_the_same_file(generate, here):
    for name in ("one.mp4", "two.mp4"):
        assert generate(PROMPT, "--seed", "7", "--steps", "4", "--out", name).status == 0
    assert (here / "one.mp4").read_bytes() == (here / "two.mp4").read_bytes()
    assert generate(PROMPT, "--seed", "8", "--steps", "4", "--out", "three.mp4").status == 0
    assert (here / "three.mp4").read_bytes() != (here / "one.mp4").read_bytes()


def test_an_output_of_several_is_its_seeds_own():
    engine = safelight.Engine.from_pretrained()
    several = engine.generate(PROMPT, seed=7, num_outputs=4, num_steps=4).outputs
    assert [output.seed for output in several] == [7, 8, 9, 10]
    single = engine.generate(PROMPT, seed=10, num_steps=4).outputs[0]
    difference = np.abs(several[3].frames.astype(int) - single.frames.astype(int))
    assert difference.max() <= 1  # the latents agree within rounding, and one level is a frame's rounding
    assert (several[2].frames != single.frames).any()


def test_one_frame_is_a_picture(generate, here):
    ran = generate("a green triangle", "--frames", "1", "--steps", "2", "--out", "triangle.png")
    assert ran.status == 0, ran.err
    assert (here / "triangle.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert read_metadata(here / "triangle.png")["outputs"][0]["num_frames"] == 1


LONG = ("a red circle moving right, " * 400)[:10_000]


@pytest.mark.parametrize("prompt", ["猫 🐱‍👤 向右移动的红色圆圈", LONG, "🎉"], ids=["Chinese", "long", "emoji"])
def test_dx_068_any_prompt_works_and_makes_a_file_name(generate, here, prompt):
    ran = generate(prompt, "--steps", "1", "--seed", "7", "--json")
    assert ran.status == 0, ran.err
    [path] = here.iterdir()
    assert read_metadata(path)["request"]["prompt"] == prompt
    assert bool(json.loads(ran.out)["warnings"]) == (prompt == LONG)  # it was cut, and that is told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--steps", "1"], "PROMPT is empty"),
        ([PROMPT, "--steps", "-1"], "--steps is -1; it must be a whole number from 1 to 10000"),
        ([PROMPT, "--seed", "-1"], "--seed is -1; it must be a whole number from 0 to 9223372036854775807"),
        ([PROMPT, "--seed", str(2**63)], "it must be a whole number from 0 to 9223372036854775807"),
        ([PROMPT, "--widht", "64"], "unknown option --widht; did you mean --size WIDTHxHEIGHT?"),
        ([PROMPT, "--out", "/proc/circle.mp4"], "can't write in directory /proc"),
        ([PROMPT, "--out", "there.mp4"], "there.mp4 exists already"),
        ([PROMPT, "--model", "."], "model_index.json"),
        ([PROMPT, "--model", "./nowhere"], "nowhere"),
        ([PROMPT, "--attention", "sdpaa"], "did you mean sdpa?"),
    ],
)
def test_bad_input_is_refused_without_torch(generate, here, arguments, message):
    (here / "there.mp4").write_text("mine")
    ran = generate(*arguments)
    assert ran.status == 2
    assert message in ran.err
    assert ran.err.startswith("safelight: error: ")
    assert ran.err.count("\n") == 0
    assert ran.out == ""
    assert not ran.used_torch
    assert [path.name for path in here.iterdir()] == ["there.mp4"]
    assert (here / "there.mp4").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--size", "60x64"], ["--size: the width is 60", "64 (or 48)"]),
        (["--size", "64x67"], ["--size: the height is 67", "64 (or 80)"]),
        (["--size", "67x60"], ["--size: the width is 67", "64 (or 80)", "--size: the height is 60", "64 (or 48)"]),
        (["--frames", "8"], ["--frames is 8", "9 (or 5)"]),
    ],
)
def test_sizes_that_the_model_cannot_do_are_refused_with_the_nearest(generate, here, arguments, told):
    ran = generate(PROMPT, *arguments)
    assert ran.status == 2
    assert ran.err.startswith("safelight: error: ")
    assert all(text in ran.err for text in told)
    assert not ran.used_torch
    assert list(here.iterdir()) == []


def test_a_component_that_the_model_lacks_is_refused_with_those_it_has(generate, here):
    ran = generate(PROMPT, "--attention", "transfromer.self=sdpa")
    assert ran.status == 2
    assert "did you mean transformer.self?" in ran.err
    assert list(here.iterdir()) == []


def shorten(path):
    os.truncate(path, path.stat().st_size - 100)


def spoil_header(path):
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)


def lengthen_header(path):
    data = bytearray(path.read_bytes())
    data[:8] = (2**40).to_bytes(8, "little")
    path.write_bytes(data)


def lose_a_shard(path):
    """Make it the first of two shards, and leave out the second."""
    with open(path, "rb") as file:
        names = list(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    names = [name for name in names if name != "__metadata__"]
    shards = [f"{path.stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"metadata": {}, "weight_map": {name: shards[name == names[-1]] for name in names}}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(index))
    path.rename(path.with_name(shards[0]))


@pytest.mark.parametrize("damage", [Path.unlink, shorten, spoil_header, lengthen_header, lose_a_shard])
def test_damaged_weights_are_refused_by_name(generate, here, checkpoint, damage):
    weights = weights_of(checkpoint)
    damage(weights)
    ran = generate(PROMPT, "--model", str(checkpoint))
    assert ran.status == 2
    assert ran.err.startswith("safelight: error: ")
    assert str(weights.parent) in ran.err
    assert ("00002-of-00002" if damage is lose_a_shard else weights.name) in ran.err
    assert not ran.used_torch
    assert list(here.iterdir()) == []


def test_a_model_without_its_index_is_refused(generate, here, checkpoint):
    (checkpoint / "model_index.json").unlink()
    ran = generate(PROMPT, "--model", str(checkpoint))
    assert ran.status == 2
    assert "model_index.json" in ran.err
    assert not ran.used_torch
    assert list(here.iterdir()) == []


def members_of(group):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize(("signum", "reason"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_dx_047_a_run_that_is_stopped_leaves_nothing(start, here, signum, reason):
    process = start(PROMPT, "--steps", "2000", "--out", "circle.mp4")
    for line in process.stderr:
        if line.startswith("denoise"):
            break
    process.send_signal(signum)
    start_s = time.monotonic()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signum
    assert f"safelight: {reason}" in err.splitlines()
    assert "Traceback" not in err
    assert out == ""
    assert time.monotonic() - start_s < 15  # all its steps take minutes
    assert list(here.iterdir()) == []
    assert members_of(process.pid) == []


def test_dx_047_a_start_that_is_stopped_says_one_thing(start, here):
    begin_s = time.monotonic()
    process = start(PROMPT, "--steps", "2000")
    loading_s = None
    for line in process.stderr:
        if line.startswith("load"):
            loading_s = time.monotonic() - begin_s
        if line.startswith("denoise"):
            break
    denoising_s = time.monotonic() - begin_s
    process.kill()
    assert loading_s is not None
    for share in (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9):
        process = start(PROMPT, "--steps", "2000")
        time.sleep(loading_s + share * (denoising_s - loading_s))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, err
        assert "safelight: interrupted" in err.splitlines()
        assert "Traceback" not in err
        assert out == ""
        assert list(here.iterdir()) == []
