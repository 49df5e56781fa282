"""`safelight explain FILE`: what a file tells about itself, for people and as JSON."""

import json

import pytest


@pytest.fixture
def clip(safelight, engine):
    engine.warnings = ("the prompt was cut",)
    arguments = ("--negative", "a dog", "--seed", "7", "--fps", "24000/1001", "--out", "cat.mp4")
    assert safelight("generate", "a\tcat \x1b[31m猫", *arguments).status == 0
    return "cat.mp4"


def test_a_file_is_told_in_text(safelight, clip):
    ran = safelight("explain", clip)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "cat.mp4  64x64, 9 frames at 23.976 fps, seed 7",
        "  model           fake",
        r"  prompt          a\tcat \x1b[31m猫",
        "  negative_prompt a dog",
        "  num_steps       4",
        "  guidance_scale  3.0",
        "  machine         cpu (cpu-avx2), torch 2.13.0",
        "  safelight       0.1.0",
        "attention",
        "  transformer: self x6 sdpa (platform default)",
        "warning: the prompt was cut",
    ]


def test_a_picture_is_told_too(safelight):
    assert safelight("generate", "a cat", "--frames", "1", "--seed", "7").status == 0
    assert safelight("explain", "a-cat-seed7.png").out.startswith("a-cat-seed7.png  64x64, 1 frame, seed 7\n")


def test_json_is_the_document_in_the_file(safelight, clip):
    ran = safelight("explain", clip, "--json")
    document = json.loads(ran.out)
    assert document["safelight"] == "0.1.0"
    assert document["outputs"][0]["path"] == clip
    assert document["request"]["prompt"] == "a\tcat \x1b[31m猫"
    assert document["request"]["fps"] == "24000/1001"
    assert document["plan"]["layers"][0]["backend"] == "sdpa"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.mp4", "can't read missing.mp4: No such file or directory"),
        (".", "can't read .: Is a directory"),
        ("note.txt", "note.txt carries no Safelight metadata"),
    ],
)
def test_what_is_not_ours_is_refused(safelight, tmp_path, name, message):
    (tmp_path / "note.txt").write_text("hello")
    ran = safelight("explain", name)
    assert ran.status == 2
    assert ran.err.startswith(f"safelight: error: {message}")
    assert ran.out == ""


def test_metadata_of_a_version_that_is_not_known_is_refused_as_text_only(safelight, clip, tmp_path):
    data = (tmp_path / clip).read_bytes()
    (tmp_path / clip).write_bytes(data.replace(b'"role":"self"', b'"rule":"self"'))
    ran = safelight("explain", clip)
    assert ran.status == 2
    assert "written by safelight 0.1.0, whose metadata this version doesn't know" in ran.err
    assert json.loads(safelight("explain", clip, "--json").out)["plan"]["layers"][0]["rule"] == "self"


def test_an_unknown_option_is_refused(safelight):
    ran = safelight("explain", "cat.mp4", "--jsno")
    assert ran.status == 2
    assert "unknown option --jsno; did you mean --json?" in ran.err
