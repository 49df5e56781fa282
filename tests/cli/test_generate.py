"""`safelight generate` around the engine: what it is asked, what is saved, and what is printed where."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from safelight.media import probe_video, read_metadata
from tests.cli.fake_engine import plan_with


def test_a_result_is_saved_and_told_in_one_line(safelight, engine, tmp_path):
    ran = safelight("generate", "a red circle", "--seed", "7", "--out", "circle.mp4")
    assert ran.status == 0, ran.err
    assert re.fullmatch(r"circle\.mp4  64x64, 9 frames at 8 fps, seed 7, \d+\.\d s\n", ran.out)
    assert [path.name for path in tmp_path.iterdir()] == ["circle.mp4"]
    facts = probe_video(tmp_path / "circle.mp4")
    assert (facts.width, facts.height, facts.num_frames, facts.fps) == (64, 64, 9, 8)
    assert (facts.codec, facts.pix_fmt, facts.index_first) == ("h264", "yuv420p", True)


def test_one_frame_is_a_picture(safelight, tmp_path):
    ran = safelight("generate", "a red circle", "--frames", "1", "--seed", "7")
    assert ran.status == 0, ran.err
    assert re.fullmatch(r"a-red-circle-seed7\.png  64x64, 1 frame, seed 7, \d+\.\d s\n", ran.out)
    assert read_metadata(tmp_path / "a-red-circle-seed7.png")["request"]["prompt"] == "a red circle"


def test_several_outputs_are_a_line_each(safelight, tmp_path):
    ran = safelight(
        "generate", "a cat", "--seed", str(2**63 - 1), "--num-outputs", "2", "--out", "cat", "--fps", "23.976"
    )
    assert ran.status == 0, ran.err
    assert ran.out.splitlines() == [
        f"cat-0.mp4  64x64, 9 frames at 23.976 fps, seed {2**63 - 1}",
        "cat-1.mp4  64x64, 9 frames at 23.976 fps, seed 0",
    ]
    assert re.search(r"\n2 outputs in \d+\.\d s\n$", ran.err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat-0.mp4", "cat-1.mp4"]


def test_every_option_reaches_the_engine(safelight, engine):
    ran = safelight(
        *("generate", "a cat", "--negative", "a dog", "--size", "80x48", "--frames", "5", "--fps", "12"),
        *("--steps", "3", "--guidance", "1.5", "--guidance-2", "2.5", "--seed", "9", "--num-outputs", "2"),
        *("--attention", "sdpa", "--device", "cpu", "--dtype", "float32"),
    )
    assert ran.status == 0, ran.err
    [(model, options)] = engine.opened
    assert model is None
    assert (options["attention"], options["device"], options["dtype"]) == ({"": "sdpa"}, "cpu", "float32")
    assert options["attention_source"] == "`--attention` flag"
    asked = engine.requests[0].to_json()
    assert asked == {
        "prompt": "a cat",
        "negative_prompt": "a dog",
        "width": 80,
        "height": 48,
        "num_frames": 5,
        "fps": "12",
        "num_steps": 3,
        "guidance_scale": 1.5,
        "guidance_scale_2": 2.5,
        "seed": 9,
        "num_outputs": 2,
        "attention": {},
    }


def test_what_is_not_asked_is_left_to_the_engine(safelight, engine):
    assert safelight("generate", "a cat").status == 0
    _, options = engine.opened[0]
    assert (options["attention"], options["device"], options["dtype"]) == (None, None, None)


def test_json_is_all_that_standard_output_holds(safelight, tmp_path):
    ran = safelight("generate", "a red circle", "--seed", "7", "--json")
    assert ran.status == 0
    document = json.loads(ran.out)
    assert list(document) == ["outputs", "plan", "request", "timings_s", "warnings", "model"]
    assert document["outputs"] == [
        {"path": "a-red-circle-seed7.mp4", "seed": 7, "width": 64, "height": 64, "num_frames": 9, "fps": 8.0}
    ]
    assert document["plan"] == plan_with().to_json()
    assert document["model"] == "fake"
    assert document["request"]["num_steps"] == 4
    assert document["timings_s"] == {"denoise": 0.25}


def test_the_plan_is_told_before_denoising(safelight):
    lines = safelight("generate", "a cat").err.splitlines()
    assert lines == [
        "load",
        "fake on cpu (cpu-avx2), float32",
        "transformer: self x6 sdpa (platform default)",
        "encode",
        "denoise 0/4",
        "decode",
        "write",
    ]


def test_warnings_are_told(safelight, engine):
    engine.warnings = ("the prompt was cut after 512 tokens",)
    ran = safelight("generate", "a cat", "--json")
    assert "safelight: warning: the prompt was cut after 512 tokens\n" in ran.err
    assert json.loads(ran.out)["warnings"] == ["the prompt was cut after 512 tokens"]


def test_a_seed_is_drawn_recorded_and_in_the_name(safelight, engine):
    seeds = []
    for _ in range(2):
        document = json.loads(safelight("generate", "a cat", "--json").out)
        seed = document["outputs"][0]["seed"]
        assert document["request"]["seed"] == engine.requests[-1].seed == seed
        assert document["outputs"][0]["path"] == f"a-cat-seed{seed}.mp4"
        seeds.append(seed)
    assert seeds[0] != seeds[1]


def test_a_default_name_is_never_taken_twice(safelight, tmp_path):
    paths = [
        json.loads(safelight("generate", "a cat", "--seed", "7", "--json").out)["outputs"][0]["path"] for _ in "ab"
    ]
    assert paths == ["a-cat-seed7.mp4", "a-cat-seed7_2.mp4"]


@pytest.mark.parametrize(
    ("out", "arguments", "message"),
    [
        ("there.mp4", [], "there.mp4 exists already; choose another name, or pass --overwrite to replace it"),
        ("there", [], "there.mp4 exists already"),
        ("there.png", ["--frames", "9"], "more than one frame is an MP4"),
        ("clip.mp4", ["--frames", "1"], "one frame is a PNG"),
        ("folder", [], "folder is a directory; give a file name"),
        ("missing/clip.mp4", [], "can't write in directory missing: No such file or directory"),
        ("there.mp4/clip.mp4", [], "can't write in directory there.mp4: Not a directory"),
        ("/proc/clip.mp4", [], "can't write in directory /proc: "),
        ("x" * 300, [], "File name too long"),
    ],
)
def test_dx_104_an_output_that_cannot_be_written_is_refused_before_any_work(
    safelight, engine, tmp_path, out, arguments, message
):
    (tmp_path / "there.mp4").write_text("mine")
    (tmp_path / "folder").mkdir()
    ran = safelight("generate", "a cat", "--out", out, *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert engine.opened == []
    assert (tmp_path / "there.mp4").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "there.mp4"]


def test_a_png_for_a_model_that_makes_videos_is_refused_before_any_work(safelight, engine):
    ran = safelight("generate", "a cat", "--out", "cat.png")
    assert ran.status == 2
    assert "more than one frame is an MP4" in ran.err
    assert engine.opened == []


def test_overwrite_replaces_the_file(safelight, tmp_path):
    (tmp_path / "there.mp4").write_text("mine")
    ran = safelight("generate", "a cat", "--out", "there.mp4", "--overwrite")
    assert ran.status == 0, ran.err
    assert probe_video(tmp_path / "there.mp4").num_frames == 9


def test_dx_104_a_write_that_fails_leaves_nothing_and_says_why(start, tmp_path):
    process = start("generate", "a cat", "--num-outputs", "2", "--out", "cat.mp4", fake="limit")
    out, err = process.communicate()
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("safelight: error: ")
    assert "File too large; no file was left" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_what_the_model_cannot_do_is_refused_by_the_names_of_the_options(safelight, engine):
    ran = safelight("generate", "a cat", "--size", "60x61", "--out", "missing/cat.mp4")
    assert ran.status == 2
    assert ran.err.splitlines()[:3] == [
        "safelight: error: 3 problems:",
        "  --size: the width is 60; it must be a multiple of 8",
        "  --size: the height is 61; it must be a multiple of 8",
    ]
    assert "missing" in ran.err.splitlines()[3]
    assert engine.opened == []


@pytest.mark.parametrize(
    "prompt", ["猫が走る", "🐱‍👤 🎉", "x" * 10_000, "a &amp; b", "ａ   b", "a\nb", "../../etc", "."]
)
def test_dx_068_any_prompt_arrives_as_it_is_and_makes_a_file_name(safelight, engine, tmp_path, prompt):
    ran = safelight("generate", prompt, "--json")
    assert ran.status == 0, ran.err
    assert engine.requests[0].prompt == prompt
    [path] = tmp_path.iterdir()
    assert json.loads(ran.out)["outputs"][0]["path"] == path.name
    assert read_metadata(path)["request"]["prompt"] == prompt


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"a cat", "a cat"),
        (b"a cat\n", "a cat"),
        (b"a cat\r\n", "a cat"),
        ("猫\n\n".encode(), "猫\n"),
        (b"\xef\xbb\xbfa cat", "a cat"),
        (b" a  &amp; b ", " a  &amp; b "),
    ],
)
def test_dx_068_a_prompt_from_standard_input_is_the_text_of_the_file(
    safelight, engine, monkeypatch, tmp_path, data, prompt
):
    source = tmp_path / "prompt.txt"
    source.write_bytes(data)
    with open(source, encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        ran = safelight("generate", "-")
    assert ran.status == 0, ran.err
    assert engine.requests[0].prompt == prompt


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\n", "PROMPT is empty; say what to generate"), (b"a \xff cat", "isn't UTF-8 text: byte 2 is wrong")],
)
def test_dx_068_a_wrong_prompt_from_standard_input_is_refused(safelight, engine, monkeypatch, tmp_path, data, message):
    source = tmp_path / "prompt.txt"
    source.write_bytes(data)
    with open(source, encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        ran = safelight("generate", "-")
    assert ran.status == 2
    assert message in ran.err
    assert engine.opened == []


def test_an_error_is_json_too_when_that_is_asked_for(safelight):
    ran = safelight("generate", "a cat", "--steps", "-1", "--json")
    assert ran.status == 2
    message = "--steps is -1; it must be a whole number from 1 to 10000"
    assert ran.err == f"safelight: error: {message}\n"
    assert json.loads(ran.out) == {
        "error": {"error": "RequestError", "message": message, "details": {"problems": [message]}}
    }


def test_dx_076_what_others_print_in_this_process_goes_to_standard_error(safelight, engine):
    engine.during = lambda: print("from a library")
    ran = safelight("generate", "a cat", "--json", "--steps", "1")
    assert json.loads(ran.out)["warnings"] == []
    assert "from a library\n" in ran.err


def test_dx_076_what_others_print_does_not_reach_standard_output(start, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would have C flush at once, too
    process = start("generate", "a cat", "--seed", "7", "--steps", "1", "--json", fake="print_everywhere")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["outputs"][0]["seed"] == 7
    told = {"from print", "from the first stdout", "from a file descriptor", "from a child"}
    assert told | {"from C, flushed when the process exits"} <= set(err.splitlines())


def test_dx_076_errors_of_our_own_show_a_traceback_and_leave_standard_output_empty(start, tmp_path):
    process = start("generate", "a cat", "--json", fake="fail")
    out, err = process.communicate()
    assert process.returncode == 1
    assert out == ""
    assert "Traceback" in err
    assert err.splitlines()[-1] == "ZeroDivisionError: our own mistake"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_dx_076_closed_streams_are_no_place_for_a_file(tmp_path, closed):
    redirections = " ".join(f"{fd}>&-" for fd in closed.split())
    program = Path(__file__).with_name("fake_program.py")
    command = f'"{sys.executable}" "{program}" generate "a cat" --out cat.mp4 {redirections}'
    ran = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert probe_video(tmp_path / "cat.mp4").num_frames == 9
    assert "Traceback" not in ran.stderr


def test_a_reader_that_has_gone_is_no_error_to_talk_about(start, tmp_path):
    process = start("generate", "a cat", "--steps", "1", "--out", "cat.mp4", "--json")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 1
    assert "BrokenPipe" not in err
    assert "Traceback" not in err
    assert probe_video(tmp_path / "cat.mp4").num_frames == 9


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_name_can_be_printed_in_any_encoding(start, tmp_path, monkeypatch, encoding):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    process = start("generate", "猫", "--seed", "7", text=False)
    out, err = process.communicate()
    assert process.returncode == 0, err
    shown = "猫" if encoding == "utf-8" else "\\u732b"
    assert out.decode(encoding).startswith(f"{shown}-seed7.mp4  64x64")
