"""Names of result files: default ones, asked ones, and what is refused before a run."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from safelight import naming
from safelight.errors import OutputError
from safelight.media import read_metadata, save_result
from safelight.naming import default_stem
from tests.unit.media_results import LONG_PROMPTS, PROGRAM, PROMPT, clip, names, planned, result_of, still

# Names


@pytest.mark.parametrize("prompt", LONG_PROMPTS.values(), ids=LONG_PROMPTS)
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_any_prompt_makes_a_file_name(tmp_path: Path, prompt: str, num_outputs: int) -> None:
    paths = planned(tmp_path, prompt=prompt, num_outputs=num_outputs, num_frames=1, seed=2**63 - 1)
    saved = save_result(result_of(*[still()] * num_outputs, prompt=prompt, seed=2**63 - 1), None, directory=tmp_path)
    assert [output.path for output in saved.outputs] == paths
    assert names(tmp_path) == sorted(path.name for path in paths)


@given(st.text(st.characters(), max_size=400) | st.text("a \ud800़️👩‍ก", max_size=400), st.integers(0, 2**63 - 1))
@settings(deadline=None)
def test_a_default_name_is_always_safe(prompt: str, seed: int) -> None:
    stem = default_stem(prompt, seed)
    slug = stem.removesuffix(f"-seed{seed}")
    assert slug != stem
    assert slug
    assert len(os.fsencode(slug)) <= naming.SLUG_BYTES
    assert len(os.fsencode(f"{stem}_999999-999.mp4")) < 143
    assert not set(stem) & set("\0/\\:*?\"<>|. \t\n'$`~&;()[]{}!#%^=,+")
    assert not stem.startswith("-")
    assert stem.isprintable()
    assert stem == default_stem(prompt, seed)


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("A red circle, moving RIGHT!", "a-red-circle-moving-right-seed7"),
        ("一个红色的圆圈", "一个红色的圆圈-seed7"),
        ("लाल वृत्त", "लाल-वृत्त-seed7"),
        ("🔴 ➡️", "untitled-seed7"),
        ("1️⃣ red 🔴 circle", "1-red-circle-seed7"),
        ("CON", "con-seed7"),
        ("../../etc/passwd", "etc-passwd-seed7"),
        ("longer words " * 40, "longer-words-" * 6 + "seed7"),
        ("x" * 200, "x" * 80 + "-seed7"),
        ("é" * 200, "é" * 40 + "-seed7"),
        ("cafe\u0301", "café-seed7"),
    ],
)
def test_default_names_can_be_read(prompt: str, stem: str) -> None:
    assert default_stem(prompt, 7) == stem


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are Unicode in every locale")
def test_a_default_name_suits_a_file_system_that_knows_ascii_only(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + ASCII_NAMES, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    )
    assert (done.stdout, done.stderr) == ("ascii caf-2-seed7 untitled-seed7\n", "")


ASCII_NAMES = """
from safelight.naming import default_stem
print(sys.getfilesystemencoding(), default_stem("Caf\\u00e9 2", 7), default_stem("\\u4e00", 7))
"""


def test_dx_040_a_second_run_takes_the_next_number(tmp_path: Path) -> None:
    for value in range(3):
        save_result(result_of(still(value)), None, directory=tmp_path)
    stem = default_stem(PROMPT, 7)
    assert names(tmp_path) == [f"{stem}.png", f"{stem}_2.png", f"{stem}_3.png"]
    assert planned(tmp_path, num_frames=1) == [tmp_path / f"{stem}_4.png"]


def test_dx_040_a_gap_is_not_filled(tmp_path: Path) -> None:
    for value in range(3):
        save_result(result_of(still(value)), None, directory=tmp_path)
    (tmp_path / f"{default_stem(PROMPT, 7)}_2.png").unlink()
    saved = save_result(result_of(still(9)), None, directory=tmp_path)
    assert saved.outputs[0].path == tmp_path / f"{default_stem(PROMPT, 7)}_4.png"


def test_dx_040_numbers_of_several_outputs_and_of_one_share_a_count(tmp_path: Path) -> None:
    stem = default_stem(PROMPT, 7)
    save_result(result_of(still()), None, directory=tmp_path)
    save_result(result_of(still(), still()), None, directory=tmp_path)
    save_result(result_of(clip()), None, directory=tmp_path)
    assert names(tmp_path) == [f"{stem}.png", f"{stem}_2-0.png", f"{stem}_2-1.png", f"{stem}_3.mp4"]


def test_dx_040_a_name_that_the_count_does_not_see_is_passed_over(tmp_path: Path) -> None:
    """A prompt that ends like another's number, and a number too large to be ours."""
    (tmp_path / "a-seed7-0.png").write_text("theirs")
    (tmp_path / "a-seed7_99999999999.png").write_text("theirs")
    saved = save_result(result_of(still(), still(), prompt="a"), None, directory=tmp_path)
    assert [output.path for output in saved.outputs] == [tmp_path / f"a-seed7_2-{i}.png" for i in (0, 1)]
    assert (tmp_path / "a-seed7-0.png").read_text() == "theirs"


def test_dx_040_a_default_name_taken_meanwhile_moves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the count and the link, somebody else takes the name."""
    stem = default_stem(PROMPT, 7)
    link = os.link
    taken = []

    def late(source: Path, target: Path) -> None:
        if len(taken) < 3:
            Path(target).write_text("theirs")
            taken.append(Path(target).name)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    saved = save_result(result_of(still(), still()), None, directory=tmp_path)
    assert [output.path for output in saved.outputs] == [tmp_path / f"{stem}_4-{i}.png" for i in (0, 1)]
    assert taken == [f"{stem}-0.png", f"{stem}_2-0.png", f"{stem}_3-0.png"]
    assert [(tmp_path / name).read_text() for name in taken] == ["theirs"] * 3
    assert names(tmp_path) == sorted([*taken, f"{stem}_4-0.png", f"{stem}_4-1.png"])


def test_dx_040_an_asked_name_taken_meanwhile_is_kept_and_nothing_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def late(source: Path, target: Path) -> None:
        if target.name == "x-1.png":
            target.write_text("theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(OutputError, match="taken by another file"):
        save_result(result_of(still(), still(), still()), tmp_path / "x.png")
    assert names(tmp_path) == ["x-1.png"]
    assert (tmp_path / "x-1.png").read_text() == "theirs"


WRITER = """
result = result_of(np.full((1, 8, 8, 3), int(sys.argv[2]), np.uint8))
save_result(result, folder / "warm" / f"{sys.argv[2]}.png")
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    save_result(result, None, directory=folder / "out")
"""


@pytest.mark.slow
def test_dx_040_four_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "warm").mkdir()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + WRITER, str(tmp_path), str(10 * index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(4)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    stem = default_stem(PROMPT, 7)
    files = names(tmp_path / "out")
    assert files == sorted([f"{stem}.png", *(f"{stem}_{number}.png" for number in range(2, 21))])
    values = []
    for name in files:
        with Image.open(tmp_path / "out" / name) as image:
            values.append(image.getpixel((0, 0))[0])
    assert sorted(values) == sorted([0, 10, 20, 30] * 5)


# Where a file may go


@pytest.mark.parametrize(
    ("out", "num_frames", "num_outputs", "expected"),
    [
        ("x.mp4", 5, 1, ["x.mp4"]),
        ("x.png", 1, 1, ["x.png"]),
        ("x", 5, 1, ["x.mp4"]),
        ("x", 1, 1, ["x.png"]),
        ("x.", 1, 1, ["x.png"]),
        ("X.PNG", 1, 1, ["X.PNG"]),
        ("x.png", 1, 3, ["x-0.png", "x-1.png", "x-2.png"]),
        ("x", 5, 2, ["x-0.mp4", "x-1.mp4"]),
        ("圆 🔴.mp4", 5, 1, ["圆 🔴.mp4"]),
    ],
)
def test_dx_040_the_asked_name_is_taken(
    tmp_path: Path, out: str, num_frames: int, num_outputs: int, expected: list[str]
) -> None:
    paths = planned(tmp_path, out, num_frames=num_frames, num_outputs=num_outputs)
    assert paths == [tmp_path / name for name in expected]
    assert names(tmp_path) == []
    clips = [clip(num_frames) for _ in range(num_outputs)]
    saved = save_result(result_of(*clips), tmp_path / out)
    assert [output.path for output in saved.outputs] == paths
    assert names(tmp_path) == sorted(expected)


@pytest.mark.parametrize(
    ("out", "num_frames", "message"),
    [
        ("x.gif", 5, r"ends in \.gif; more than one frame is an MP4, so the name must end in \.mp4 or have no suffix"),
        ("x.png", 5, r"ends in \.png; more than one frame is an MP4"),
        ("x.mp4", 1, r"ends in \.mp4; one frame is a PNG, so the name must end in \.png"),
        ("x.jpg", 1, r"ends in \.jpg; one frame is a PNG"),
        ("x.webp", 1, r"ends in \.webp; one frame is a PNG"),
    ],
)
def test_dx_056_a_name_of_another_type_is_refused(tmp_path: Path, out: str, num_frames: int, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        planned(tmp_path, out, num_frames=num_frames)
    with pytest.raises(OutputError, match=message):
        save_result(result_of(clip(num_frames)), tmp_path / out)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("num_outputs", "existing"), [(1, "x.mp4"), (3, "x-2.mp4")])
def test_dx_040_an_existing_file_is_refused_unless_told(tmp_path: Path, num_outputs: int, existing: str) -> None:
    (tmp_path / existing).write_text("old")
    message = rf"{existing} exists already; choose another name, or pass --overwrite"
    result = result_of(*[clip()] * num_outputs)
    with pytest.raises(OutputError, match=message):
        planned(tmp_path, "x", num_outputs=num_outputs)
    with pytest.raises(OutputError, match=message):
        save_result(result, tmp_path / "x.mp4")
    assert names(tmp_path) == [existing]
    assert (tmp_path / existing).read_text() == "old"

    planned(tmp_path, "x", num_outputs=num_outputs, overwrite=True)
    assert (tmp_path / existing).read_text() == "old"
    saved = save_result(result, tmp_path / "x.mp4", overwrite=True)
    assert {output.path.name for output in saved.outputs if output.path} == set(names(tmp_path))
    assert read_metadata(tmp_path / existing)["request"]["prompt"] == PROMPT


def test_several_outputs_may_share_a_folder_with_the_unnumbered_name(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("old")
    save_result(result_of(still(), still()), tmp_path / "x.png")
    assert names(tmp_path) == ["x-0.png", "x-1.png", "x.png"]
    assert (tmp_path / "x.png").read_text() == "old"


def test_a_link_counts_as_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "x.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="exists already"):
        planned(tmp_path, "x.png", num_frames=1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_dx_104_only_a_file_is_ever_replaced(tmp_path: Path, overwrite: bool) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.mp4").mkdir()
    for out, message in (
        ("pipe.mp4", r"pipe\.mp4 exists and isn't a file"),
        ("folder", r"folder is a directory; give a file name, such as .*/folder/name\.mp4"),
        ("folder.mp4", r"folder\.mp4 is a directory; give a file name"),
        (".", "is a directory; give a file name"),
    ):
        with pytest.raises(OutputError, match=message):
            planned(tmp_path, out, overwrite=overwrite)
        with pytest.raises(OutputError, match=message):
            save_result(result_of(clip()), tmp_path / out, overwrite=overwrite)
    assert stat.S_ISFIFO((tmp_path / "pipe.mp4").lstat().st_mode)


UNWRITABLE = [
    pytest.param("missing", "No such file or directory", id="missing"),
    pytest.param("file", "Not a directory", id="file"),
    pytest.param("file/deeper", "Not a directory", id="below-a-file"),
    pytest.param(
        "/proc", "", id="proc", marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a /proc")
    ),
]


@pytest.mark.parametrize(("folder", "cause"), UNWRITABLE)
def test_dx_104_a_directory_that_cannot_be_written_is_found_before_the_run(
    tmp_path: Path, folder: str, cause: str
) -> None:
    (tmp_path / "file").write_text("a file")
    folder_path = tmp_path / folder
    message = rf"can't write in directory {folder_path}: {cause}.*; choose one that exists and can be written"
    with pytest.raises(OutputError, match=message):
        planned(folder_path, "x.mp4")
    with pytest.raises(OutputError, match=message):
        planned(folder_path)
    with pytest.raises(OutputError, match=message) as caught:
        save_result(result_of(clip()), folder_path / "x.mp4")
    assert caught.value.details["errno"] in ("ENOENT", "ENOTDIR", "EACCES", "EPERM")
    with pytest.raises(OutputError, match=message):
        save_result(result_of(clip()), None, directory=folder_path)
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("out", "message"), [("n\0.mp4", "null"), ("\ud800.mp4", "surrogates"), ("x" * 300, "too long")]
)
def test_dx_104_a_name_that_cannot_be_is_refused(tmp_path: Path, out: str, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        planned(tmp_path, out)


def test_everything_wrong_with_a_name_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "x-0.gif").write_text("old")
    with pytest.raises(OutputError) as caught:
        planned(tmp_path, "x.gif", num_outputs=2)
    assert "ends in .gif" in str(caught.value)
    assert "x-0.gif exists already" in str(caught.value)


def test_planning_leaves_no_trace(tmp_path: Path) -> None:
    planned(tmp_path)
    planned(tmp_path, "x.mp4")
    assert names(tmp_path) == []


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    """The ones that the person's umask gives, not a temporary file's private ones."""
    (tmp_path / "usual").write_text("")
    save_result(result_of(still()), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "x.png").stat().st_nlink == 1
