"""Files: what a result becomes on disk, measured by decoding it, and what is left when something goes wrong."""

import contextlib
import dataclasses
import io
import json
import os
import stat
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import safelight
from safelight import media
from safelight.errors import OutputError, RequestError, WriteError
from safelight.media import check_dimensions, default_stem, plan_paths, probe_video, read_metadata, save_result
from safelight.request import Output, Request, Result

SOURCE = Path(safelight.__file__).parents[1]
PROMPT = "a red circle moving right"
LONG_PROMPTS = {
    "emoji": "🔴 moves ➡️ 👩‍👩‍👧",
    "chinese": "一个红色的圆圈向右移动",
    "ten-thousand": "a very long prompt, 很长 " * 500,
    "ten-thousand-emoji": "🔴" * 10_000,
    "path": "../../etc/passwd",
    "windows": 'C:\\con <>:"|?*.',
    "control": "a\0b\nc\td\x1b[31m\u202e",
    "dots": "...",
    "half-pair": "a \ud83d b",
    "variation": "\ufe0f\u200d",
    "hindi": "लाल वृत्त",
}


class Plan:
    """Stands for an attention plan: save_result only asks it for JSON."""

    def to_json(self) -> dict[str, Any]:
        return {"machine": {"platform": "cpu"}, "layers": [{"component": "transformer", "backend": "sdpa"}]}


def checkerboard(num_frames: int, height: int, width: int) -> np.ndarray:
    """Black and white pixels that alternate in both directions, and swap in every frame."""
    frame, row, column = np.indices((num_frames, height, width))
    return np.repeat(((frame + row + column) % 2 * 255).astype(np.uint8)[..., None], 3, axis=3)


def result_of(
    *clips: np.ndarray, fps: Fraction = Fraction(16), prompt: str = PROMPT, seed: int = 7, **changes: Any
) -> Result:
    num_frames, height, width, _ = clips[0].shape
    request = Request(
        prompt=prompt,
        width=width,
        height=height,
        num_frames=num_frames,
        fps=fps,
        num_steps=4,
        guidance_scale=3.0,
        seed=seed,
        num_outputs=len(clips),
    )
    outputs = tuple(Output(frames=clip, seed=(seed + index) % 2**63, fps=fps) for index, clip in enumerate(clips))
    result = Result(outputs=outputs, plan=Plan(), request=request, model="tiny", timings_s={"denoise": 1.5})  # type: ignore[arg-type]
    return dataclasses.replace(result, **changes)


def still(value: int = 255, size: int = 8) -> np.ndarray:
    return np.full((1, size, size, 3), value, np.uint8)


def clip(num_frames: int = 5, height: int = 16, width: int = 16) -> np.ndarray:
    return checkerboard(num_frames, height, width)


def decoded(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def planned(folder: Path, out: str | None = None, **changes: Any) -> list[Path]:
    arguments = {"prompt": PROMPT, "seed": 7, "num_outputs": 1, "num_frames": 5, "directory": folder, **changes}
    return plan_paths(None if out is None else folder / out, **arguments)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# What is in a file


@pytest.mark.parametrize(("width", "height"), [(72, 40), (50, 30), (16, 16), (2, 2), (64, 64)])
def test_dx_041_a_video_has_the_frames_own_size_and_pixels(tmp_path: Path, width: int, height: int) -> None:
    frames = checkerboard(5, height, width)
    saved = save_result(result_of(frames), tmp_path / "clip.mp4")
    facts = probe_video(tmp_path / "clip.mp4")
    assert (facts.width, facts.height) == (width, height) == (saved.outputs[0].width, saved.outputs[0].height)
    # A rescaled checkerboard is grey: about 128 off everywhere.
    assert np.abs(decoded(tmp_path / "clip.mp4").astype(int) - frames).mean() < 3


@pytest.mark.parametrize(("width", "height"), [(51, 33), (51, 32), (50, 33), (1, 2)])
def test_dx_041_an_odd_size_is_refused_for_a_video_with_the_nearest_even_one(
    tmp_path: Path, width: int, height: int
) -> None:
    with pytest.raises(OutputError) as caught:
        save_result(result_of(clip(5, height, width)), tmp_path / "clip.mp4")
    for name, side in (("width", width), ("height", height)):
        nearest = "2" if side == 1 else f"{side - 1} or {side + 1}"
        assert (f"{name} is {side}; a video's must be even (nearest: {nearest})" in str(caught.value)) == (side % 2)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("width", "height"), [(51, 33), (72, 40), (1, 1)])
def test_dx_041_a_still_has_any_size_and_exactly_its_pixels(tmp_path: Path, width: int, height: int) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (1, height, width, 3), np.uint8)
    save_result(result_of(frames), tmp_path / "still.png")
    assert (tmp_path / "still.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with Image.open(tmp_path / "still.png") as image:
        assert (image.mode, image.size) == ("RGB", (width, height))
        np.testing.assert_array_equal(np.asarray(image), frames[0])


@pytest.mark.parametrize("side", ["width", "height"])
def test_a_side_the_encoder_cannot_take_is_refused(side: str) -> None:
    sizes = {"width": 64, "height": 64}
    check_dimensions(**sizes | {side: 16384}, num_frames=5, fps=Fraction(16))
    with pytest.raises(OutputError, match=f"{side} is 16386; a video has at most 16384"):
        check_dimensions(**sizes | {side: 16386}, num_frames=5, fps=Fraction(16))


def test_dx_058_a_video_plays_everywhere(tmp_path: Path) -> None:
    save_result(result_of(clip(5, 64, 64), fps=Fraction(8)), tmp_path / "clip.mp4")
    facts = probe_video(tmp_path / "clip.mp4")
    assert (facts.codec, facts.profile, facts.pix_fmt) == ("h264", "High", "yuv420p")
    assert facts.index_first
    assert (facts.num_frames, facts.duration_s) == (5, 5 / 8)
    # Time starts at 0 and frames are stored in the order of showing: no player needs to read an edit list.
    with av.open(str(tmp_path / "clip.mp4")) as container:
        packets = [packet for packet in container.demux(video=0) if packet.pts is not None]
        assert [packet.dts for packet in packets] == [packet.pts for packet in packets]
        assert packets[0].pts == 0
    kinds = top_level(tmp_path / "clip.mp4")
    assert kinds[0] == b"ftyp"
    assert kinds.index(b"moov") < kinds.index(b"mdat")


def top_level(path: Path) -> list[bytes]:
    """The kinds of the outermost boxes, read without the code under test."""
    data, kinds = path.read_bytes(), []
    while data:
        kinds.append(data[4:8])
        data = data[int.from_bytes(data[:4]) :]
    return kinds


def test_the_probe_tells_an_index_at_the_end(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "late.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(10))
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv444p"
        for frame in clip(3, 32, 32):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    facts = probe_video(tmp_path / "late.mp4")
    assert not facts.index_first
    assert (facts.pix_fmt, facts.num_frames, facts.fps, facts.width) == ("yuv444p", 3, 10, 32)


@pytest.mark.parametrize("content", [b"", b"not a video", b"\0\0\0\x18ftypmp42" + bytes(12)])
def test_the_probe_refuses_what_is_no_video(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.mp4").write_bytes(content)
    with pytest.raises(RequestError, match=r"x\.mp4 isn't a video"):
        probe_video(tmp_path / "x.mp4")
    with pytest.raises(RequestError, match="No such file"):
        probe_video(tmp_path / "y.mp4")


@pytest.mark.parametrize(
    "fps",
    [Fraction(1), Fraction(8), Fraction(16), Fraction(24000, 1001), Fraction("23.976"), Fraction(1000), Fraction(1, 3)],
    ids=str,
)
def test_dx_059_the_files_rate_is_the_asked_one_exactly(tmp_path: Path, fps: Fraction) -> None:
    save_result(result_of(clip(17), fps=fps), tmp_path / "clip.mp4")
    facts = probe_video(tmp_path / "clip.mp4")
    assert (facts.fps, facts.num_frames, facts.duration_s) == (fps, 17, float(17 / fps))
    with av.open(str(tmp_path / "clip.mp4")) as container:
        times = [frame.pts * frame.time_base for frame in container.decode(video=0)]
        assert times == [index / fps for index in range(17)]
    # The movie's own header: version 0, a time scale and a duration in it.
    data = (tmp_path / "clip.mp4").read_bytes()
    header = data[data.index(b"mvhd") + 4 :]
    assert header[0] == 0
    assert Fraction(int.from_bytes(header[16:20]), int.from_bytes(header[12:16])) == 17 / fps
    document = read_metadata(tmp_path / "clip.mp4")
    assert document["request"]["fps"] == str(fps)


@pytest.mark.parametrize(
    ("fps", "message"),
    [
        (Fraction(2**31, 2**31 - 1), "a video can't store that exactly (near: 1)"),
        (Fraction("23.976023976"), "a video can't store that exactly (near: "),
        (Fraction(1, 101), "a video's frame lasts at most 100 seconds"),
    ],
    ids=str,
)
def test_dx_059_a_rate_that_a_video_cannot_hold_is_refused(tmp_path: Path, fps: Fraction, message: str) -> None:
    with pytest.raises(OutputError) as caught:
        save_result(result_of(clip(), fps=fps), tmp_path / "clip.mp4")
    assert message in str(caught.value)
    save_result(result_of(still(), fps=fps), tmp_path / "still.png")


def test_the_slowest_rate_is_exact(tmp_path: Path) -> None:
    save_result(result_of(clip(2), fps=Fraction(1, 100)), tmp_path / "clip.mp4")
    assert probe_video(tmp_path / "clip.mp4").duration_s == 200


COLOURS = [(r, g, b) for r in (0, 128, 255) for g in (0, 128, 255) for b in (0, 128, 255)]


@pytest.mark.parametrize("tags", ["read", "ignored"])
def test_colours_come_back(tmp_path: Path, tags: str) -> None:
    """Flat patches of every mixture, for a reader that heeds the file's colour tags and for one that assumes BT.601."""
    frames = np.zeros((3, 32, 32 * len(COLOURS), 3), np.uint8)
    for index, colour in enumerate(COLOURS):
        frames[:, :, 32 * index : 32 * index + 32] = colour
    save_result(result_of(frames), tmp_path / "clip.mp4")
    with av.open(str(tmp_path / "clip.mp4")) as container:
        frame = next(container.decode(video=0))
        assert (frame.colorspace, frame.color_range) == (6, 1)
        assert (frame.color_primaries, frame.color_trc) == (1, 13)
        options = {"src_colorspace": "ITU601", "src_color_range": "MPEG"} if tags == "ignored" else {}
        back = frame.to_ndarray(format="rgb24", **options)
    centres = back[16, 16::32].astype(int)
    np.testing.assert_allclose(centres, COLOURS, atol=4)


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    for frames, extension in ((clip(9, 40, 72), ".mp4"), (still(), ".png")):
        first, second = (tmp_path / f"{name}{extension}" for name in "ab")
        save_result(result_of(frames), first)
        save_result(result_of(frames, timings_s={"denoise": 9.0}), second)
        assert first.read_bytes() == second.read_bytes()
        save_result(result_of(frames, seed=8), second, overwrite=True)
        assert first.read_bytes() != second.read_bytes()


def test_a_videos_bytes_do_not_depend_on_the_number_of_cores(tmp_path: Path) -> None:
    """The encoder notes its settings in the file; with "auto" threads they would be the machine's."""
    save_result(result_of(clip(9, 256, 256)), tmp_path / "clip.mp4")
    data = (tmp_path / "clip.mp4").read_bytes()
    assert b" threads=1 lookahead_threads=1 " in data


def test_a_view_of_frames_is_saved_as_it_looks(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (5, 16, 20, 3), np.uint8)
    view = frames[::-1, :, 2:18]
    save_result(result_of(view), tmp_path / "view.mp4")
    save_result(result_of(np.ascontiguousarray(view)), tmp_path / "copy.mp4")
    assert (tmp_path / "view.mp4").read_bytes() == (tmp_path / "copy.mp4").read_bytes()


def test_encoding_is_silent(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_result(result_of(clip()), tmp_path / "clip.mp4")
    assert capfd.readouterr() == ("", "")


# Metadata


@pytest.mark.parametrize("prompt", LONG_PROMPTS.values(), ids=LONG_PROMPTS)
@pytest.mark.parametrize("num_frames", [1, 5])
def test_metadata_comes_back(tmp_path: Path, prompt: str, num_frames: int) -> None:
    result = result_of(clip(num_frames), prompt=prompt, warnings=("the prompt was cut",))
    saved = save_result(result, None, directory=tmp_path)
    (path,) = [output.path for output in saved.outputs]
    assert path is not None
    expected = {"safelight": safelight.__version__, **saved.to_json()}
    del expected["timings_s"]
    assert read_metadata(path) == json.loads(json.dumps(expected))
    assert read_metadata(path)["request"]["prompt"] == prompt


def test_each_outputs_metadata_is_that_of_itself_alone(tmp_path: Path) -> None:
    clips = [still(value) for value in (0, 100, 200)]
    save_result(result_of(*clips, seed=7), tmp_path / "many.png")
    save_result(result_of(clips[2], seed=9), tmp_path / "alone.png")
    document = read_metadata(tmp_path / "many-2.png")
    assert [output["seed"] for output in document["outputs"]] == [9]
    assert (document["request"]["seed"], document["request"]["num_outputs"]) == (9, 1)
    assert (tmp_path / "many-2.png").read_bytes() == (tmp_path / "alone.png").read_bytes()


def test_metadata_follows_a_renamed_file(tmp_path: Path) -> None:
    save_result(result_of(clip()), tmp_path / "clip.mp4")
    moved = (tmp_path / "clip.mp4").rename(tmp_path / "moved")
    assert read_metadata(moved)["outputs"][0]["path"] == str(moved)


def test_metadata_is_where_other_programs_look(tmp_path: Path) -> None:
    save_result(result_of(clip()), tmp_path / "clip.mp4")
    save_result(result_of(still()), tmp_path / "still.png")
    with av.open(str(tmp_path / "clip.mp4")) as container:
        assert json.loads(container.metadata["comment"])["request"]["prompt"] == PROMPT
    with Image.open(tmp_path / "still.png") as image:
        assert json.loads(image.text["safelight"])["request"]["prompt"] == PROMPT


def foreign_png() -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (4, 4)).save(sink, "PNG")
    return sink.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        foreign_png(),
        foreign_png()[:20],
        b"\x89PNG\r\n\x1a\n",
        b"\x89PNG\r\n\x1a\n" + b"\xff\xff\xff\xfftEXtsafelight\0{",
        b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x0ctEXtsafelight\0[1",
        b"\x89PNG\r\n\x1a\n" + b"\0\x01\0\0tEXtsafelight\0" + b"[" * 65526,
        b"\0\0\0\x08ftyp\0\0\0\0moov",
        b"\0\0\0\x10ftypisom\0\0\0\0\0\0\0\x01moov\0\0\0\0\0\0\0\0",
        b"\0\0\0\x10moov\xff\xff\xff\xffudta",
    ],
    ids=range(11),
)
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(RequestError, match=r"x\.png carries no Safelight metadata; give a PNG or MP4"):
        read_metadata(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("name", "why"),
    [("missing.png", "No such file"), ("", "directory"), ("nul\0.png", "null"), ("x" * 300, "too long")],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(RequestError, match=f"(?i)can't read .*{why}.*; give a PNG or MP4"):
        read_metadata(tmp_path / name)


@pytest.mark.parametrize("num_frames", [1, 5])
def test_metadata_of_a_cut_file_never_fails_otherwise(tmp_path: Path, num_frames: int) -> None:
    saved = save_result(result_of(clip(num_frames)), None, directory=tmp_path)
    whole = saved.outputs[0].path.read_bytes()  # type: ignore[union-attr]
    cut = tmp_path / "cut"
    for length in range(0, min(len(whole), 3000), 7):
        cut.write_bytes(whole[:length])
        with contextlib.suppress(RequestError):
            assert read_metadata(cut)["request"]["prompt"] == PROMPT


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
    assert len(os.fsencode(slug)) <= media.SLUG_BYTES
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
from safelight.media import default_stem
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


# What a process of its own starts with: the least imports, and results of stills and of a noisy clip of some 130 kB.
PROGRAM = f"""
import os, signal, sys
from fractions import Fraction
from pathlib import Path
sys.path.insert(0, {str(SOURCE)!r})
import numpy as np
from safelight.errors import OutputError, WriteError
from safelight.media import plan_paths, save_result
from safelight.request import Output, Request, Result

class Plan:
    def to_json(self):
        return {{}}

def result_of(frames):
    outputs = (Output(frames=frames, seed=7, fps=Fraction(16)),)
    request = Request(prompt={PROMPT!r}, seed=7, fps=Fraction(16))
    return Result(outputs=outputs, plan=Plan(), request=request, model="tiny", timings_s={{}})

noise = np.random.default_rng(0).integers(0, 256, (24, 64, 64, 3), np.uint8)
folder = Path(sys.argv[1])
"""

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


# When it goes wrong


def run_apart(tmp_path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + "\n".join(lines), str(tmp_path)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_dx_104_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    done = run_apart(
        tmp_path,
        "import resource",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))",
        "for frames in noise, noise.reshape(1, 256, 384, 3):",
        "    for path in folder / 'x', None:",
        "        try: save_result(result_of(frames), path, directory=folder)",
        "        except WriteError as error: print(error.details['errno'], error)",
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("EFBIG ") and "File too large; no file was left" in line for line in lines)
    assert names(tmp_path) == []


@pytest.mark.slow
def test_dx_104_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"can't mount a small file system here: {mounted.stderr.strip()}")
    try:
        save_result(result_of(still(), still()), disk / "old.png")
        before = {name: (disk / name).read_bytes() for name in names(disk)}
        noise = np.random.default_rng(0).integers(0, 256, (24, 64, 64, 3), np.uint8)
        for path, overwrite in ((disk / "x.mp4", False), (None, False), (disk / "old.mp4", True)):
            with pytest.raises(WriteError, match="No space left on device; no file was left") as caught:
                save_result(result_of(noise), path, directory=disk, overwrite=overwrite)
            assert caught.value.details["errno"] == "ENOSPC"
        with pytest.raises(WriteError, match="No space left on device"):
            save_result(
                result_of(still(1), np.random.default_rng(0).integers(0, 256, (1, 200, 200, 3), np.uint8)),
                disk / "old.png",
                overwrite=True,
            )
        assert {name: (disk / name).read_bytes() for name in names(disk)} == before

        filler = disk / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(1 << 20))
        with pytest.raises(OutputError, match="No space left on device"):
            planned(disk, "x.mp4")
        assert names(disk) == sorted([*before, "filler"])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Interrupted(np.ndarray):
    """Frames during whose encoding somebody presses Ctrl-C."""

    def __getitem__(self, key: Any) -> Any:
        if key == 3:
            raise KeyboardInterrupt
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))


@pytest.mark.parametrize("path", ["x.mp4", None])
def test_an_interrupt_while_encoding_leaves_nothing(tmp_path: Path, path: str | None) -> None:
    frames = clip().view(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_result(result_of(frames), path and tmp_path / path, directory=tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_while_naming_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: int
) -> None:
    link = os.link

    def interrupted(source: Path, target: Path) -> None:
        is_it = target.name == f"x-{number}.png"
        if is_it and moment == "before":
            raise KeyboardInterrupt
        link(source, target)
        if is_it:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_result(result_of(still(), still()), tmp_path / "x.png")
    assert names(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_in_a_long_save_leaves_nothing(tmp_path: Path) -> None:
    done = run_apart(
        tmp_path,
        "signal.setitimer(signal.ITIMER_REAL, 0.4)",
        "signal.signal(signal.SIGALRM, signal.default_int_handler)",
        "try: save_result(result_of(noise.repeat(300, 0)), folder / 'x.mp4')",
        "except KeyboardInterrupt: print('interrupted', os.listdir(folder))",
    )
    assert (done.stdout, done.stderr) == ("interrupted []\n", "")


def test_an_encoder_that_fails_is_a_write_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "open", failing_open)
    with pytest.raises(WriteError, match=r"the video encoder failed: .*codec is gone"):
        save_result(result_of(clip()), tmp_path / "x.mp4")
    assert names(tmp_path) == []


def failing_open(*_: Any, **__: Any) -> None:
    raise av.error.ExternalError(542398533, "codec is gone")


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links."""

    def refused(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "link", refused)


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_names_are_still_exclusive(tmp_path: Path) -> None:
    stem = default_stem(PROMPT, 7)
    for value in (10, 20):
        save_result(result_of(still(value), still(value + 1)), None, directory=tmp_path)
    assert names(tmp_path) == [f"{stem}-0.png", f"{stem}-1.png", f"{stem}_2-0.png", f"{stem}_2-1.png"]
    values = []
    for name in names(tmp_path):
        with Image.open(tmp_path / name) as image:
            values.append(image.getpixel((0, 0))[0])
    assert values == [10, 11, 20, 21]


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_without_hard_links_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if target.name == "x-1.png":
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises((WriteError, KeyboardInterrupt)):
        save_result(result_of(still(), still()), tmp_path / "x.png")
    assert names(tmp_path) == []


def test_result_save_writes_and_reports_paths(tmp_path: Path) -> None:
    saved = result_of(still()).save(str(tmp_path / "x"))
    assert [output.path for output in saved.outputs] == [tmp_path / "x.png"]
    assert saved.to_json()["outputs"][0]["path"] == str(tmp_path / "x.png")
    with pytest.raises(OutputError, match="exists already"):
        saved.save(tmp_path / "x")
