"""Files: what a result becomes on disk, measured by decoding it, and the metadata inside."""

import contextlib
import io
import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

import safelight
from safelight.errors import OutputError, RequestError
from safelight.media import check_dimensions, probe_video, read_metadata, save_result
from tests.unit.media_results import (
    LONG_PROMPTS,
    PROMPT,
    checkerboard,
    clip,
    decoded,
    names,
    result_of,
    still,
)

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
