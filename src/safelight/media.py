"""Results as files: one frame becomes a PNG, more an MP4, written whole, under a free name, with their origin inside.

A file is encoded in memory, written under a temporary name in its own directory, then linked to its final name: a final
name never holds part of a file, and nothing is overwritten by accident. Each file carries one JSON document, which is
Result.to_json() as it would be had this output been generated alone, in the PNG's tEXt chunk "safelight" or the MP4's
"comment" tag.
"""

import contextlib
import dataclasses
import io
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safelight import __version__
from safelight.errors import OutputError, RequestError, WriteError
from safelight.naming import (
    asked_paths,
    cause_of,
    default_paths,
    default_stem,
    extension_for,
    next_number,
    publish,
    write_temporary,
)
from safelight.request import Output, Result

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

METADATA_KEY = "safelight"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# libx264 opens no larger frame. MP4 and H.264 store a rate as two 32-bit integers, and a frame's duration as one.
MAX_SIDE = 16384
MAX_RATE_PART = 2**31 - 1
MAX_FRAME_S = 100

# One thread: the bytes don't depend on how many cores there are. No B-frames: time starts at 0 without an edit list,
# which some players ignore.
X264_OPTIONS = {"crf": "12", "preset": "medium", "threads": "1", "bf": "0"}

# The colours of JPEG (sYCC): sRGB with the BT.601 matrix, here in the range 16 to 235 since yuv420p means that. With
# the BT.709 matrix, readers that ignore the tags show saturated colours up to 23 levels of 255 off; with this one, 2.
BT601_MATRIX, VIDEO_RANGE, BT709_PRIMARIES, SRGB_TRANSFER = 6, 1, 1, 13


def check_dimensions(*, width: int, height: int, num_frames: int, fps: Fraction) -> None:
    """Raise OutputError for a clip that H.264 in yuv420p can't hold exactly; a single frame (PNG) can be any size.

    yuv420p has one colour sample for 2x2 pixels, so sides are even. An odd size is refused, never padded or rescaled.
    """
    if num_frames == 1:
        return
    problems = []
    for name, side in (("width", width), ("height", height)):
        if side > MAX_SIDE:
            problems.append(f"{name} is {side}; a video has at most {MAX_SIDE} pixels on a side")
        elif side % 2:
            nearest = f"{side - 1} or {side + 1}" if side > 1 else "2"
            problems.append(f"{name} is {side}; a video's must be even (nearest: {nearest}), only a PNG's can be odd")
    if fps < Fraction(1, MAX_FRAME_S):
        problems.append(f"fps is {fps}; a video's frame lasts at most {MAX_FRAME_S} seconds")
    elif max(fps.numerator, fps.denominator) > MAX_RATE_PART:
        problems.append(f"fps is {fps}; a video can't store that exactly (near: {fps.limit_denominator(2_000_000)})")
    if problems:
        raise OutputError("; ".join(problems), width=width, height=height, fps=str(fps))


def save_result(result: Result, path: Path | None, *, overwrite: bool = False, directory: Path | None = None) -> Result:
    """Write every output, all or none, and return the result with their paths.

    `path` None takes the next free default name in `directory` (None is the current one), also when several processes
    write there at once. Several outputs are numbered name-0, name-1, ... Equal frames, request and plan give equal
    bytes. Raises OutputError where the files can't go and WriteError when encoding or writing fails: then no new file
    stays, and a file that was to be overwritten is whole, the old one or the new.
    """
    for output in result.outputs:
        check_dimensions(width=output.width, height=output.height, num_frames=output.num_frames, fps=output.fps)
    num_outputs = len(result.outputs)
    extension = extension_for(result.outputs[0].num_frames)
    asked = None if path is None else asked_paths(path, extension, num_outputs, overwrite)
    folder = path.parent if path is not None else directory or Path()
    files = [_encode(output, _document(result, output)) for output in result.outputs]
    with contextlib.ExitStack() as cleanup:
        temporaries = [write_temporary(folder, file, cleanup) for file in files]
        if asked is None:
            assert result.request.seed is not None, "a result's request has no None left"
            stem = default_stem(result.request.prompt, result.request.seed)
            number = next_number(folder, stem)
            while not publish(temporaries, paths := default_paths(folder, stem, number, extension, num_outputs)):
                number += 1
        elif not publish(temporaries, paths := asked, overwrite=overwrite):
            raise OutputError(f"{path} was taken by another file meanwhile; choose another name", path=str(path))
    return dataclasses.replace(
        result, outputs=tuple(dataclasses.replace(o, path=p) for o, p in zip(result.outputs, paths, strict=True))
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """The document inside a PNG or MP4 that Safelight wrote, with the file's present path as its output's path.

    Its keys are "safelight" (the version that wrote it), and from Result.to_json() "model", "outputs" (this one),
    "plan", "request" and "warnings". Raises RequestError for a file that can't be read or has no such document.
    """
    remedy = "give a PNG or MP4 as safelight wrote it"
    try:
        with open(path, "rb") as file:
            # A map, since a file that isn't ours may be larger than memory; an empty file can't be mapped.
            is_empty = os.fstat(file.fileno()).st_size == 0
            data = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise RequestError(f"can't read {path}: {cause_of(error)}; {remedy}", path=str(path)) from error
    text = _png_text(data) if data[: len(PNG_SIGNATURE)] == PNG_SIGNATURE else _mp4_comment(data)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or METADATA_KEY not in document:
        raise RequestError(f"{path} carries no Safelight metadata; {remedy}", path=str(path))
    document["outputs"] = [{**output, "path": str(path)} for output in document["outputs"]]
    return document


@dataclass(frozen=True, kw_only=True)
class VideoFacts:
    """What a video file holds. `num_frames` were decoded; `index_first` says that moov stands before mdat."""

    codec: str
    profile: str | None
    pix_fmt: str | None
    width: int
    height: int
    fps: Fraction
    num_frames: int
    index_first: bool
    duration_s: float


def probe_video(path: Path) -> VideoFacts:
    """Measure a video file, decoding all of it; raise RequestError for one that can't be decoded."""
    import av

    try:
        with av.open(str(path), "r", metadata_errors="replace") as container:
            stream = container.streams.video[0]
            num_frames = sum(1 for _ in container.decode(stream))
            codec = stream.codec_context
            facts = VideoFacts(
                codec=codec.name,
                profile=codec.profile,
                pix_fmt=codec.pix_fmt,
                width=codec.width,
                height=codec.height,
                fps=stream.average_rate or Fraction(0),
                num_frames=num_frames,
                index_first=False,
                duration_s=float((stream.duration or 0) * (stream.time_base or Fraction(0))),
            )
    except (av.error.FFmpegError, IndexError) as error:
        raise RequestError(f"{path} isn't a video that can be decoded: {error}", path=str(path)) from error
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        order = [kind for kind, _, _ in _boxes(data, 0, len(data)) if kind in (b"moov", b"mdat")]
    return dataclasses.replace(facts, index_first=order[:1] == [b"moov"])


def _document(result: Result, output: Output) -> str:
    """What a file says about its origin: all that made the picture, and nothing else.

    The request is the one that gives this output alone (rule G2). Timings and paths are left out: they differ between
    runs that made the same picture.
    """
    alone = dataclasses.replace(
        result,
        outputs=(dataclasses.replace(output, path=None),),
        request=result.request.replace(seed=output.seed, num_outputs=1),
    )
    document = {METADATA_KEY: __version__, **alone.to_json()}
    del document["timings_s"]
    # ASCII, with \u escapes: any text survives every reader, NUL included.
    return json.dumps(document, separators=(",", ":"))


# Encoding


def _encode(output: Output, document: str) -> bytes:
    """The whole file of an output."""
    assert output.frames.dtype == "uint8", output.frames.dtype
    assert output.frames.shape[3] == 3, output.frames.shape
    if output.num_frames == 1:
        return _encode_png(output.frames[0], document)
    return _encode_mp4(output.frames, output.fps, document)


def _encode_png(frame: "NDArray[np.uint8]", document: str) -> bytes:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text(METADATA_KEY, document)
    sink = io.BytesIO()
    Image.fromarray(frame).save(sink, "PNG", pnginfo=text)
    return sink.getvalue()


def _encode_mp4(frames: "NDArray[np.uint8]", fps: Fraction, document: str) -> bytes:
    """H.264 in yuv420p, frame i at exactly i / fps, index first."""
    import av
    import numpy as np
    from av.video.reformatter import Colorspace, Interpolation, VideoReformatter

    sink = io.BytesIO()
    # A frame's duration is exact in the movie's time scale too, which is milliseconds by default.
    options = {"movflags": "faststart", "movie_timescale": str(fps.numerator)}
    converter = VideoReformatter()

    def written(*_: Any) -> io.BytesIO:
        """What the muxer reads again when it moves the index to the front."""
        return io.BytesIO(sink.getvalue())

    try:
        with av.open(sink, "w", format="mp4", options=options, io_open=written) as container:
            container.metadata["comment"] = document
            stream = container.add_stream("libx264", rate=fps, options=X264_OPTIONS)
            codec = stream.codec_context
            codec.height, codec.width = frames.shape[1:3]
            codec.pix_fmt = "yuv420p"
            codec.time_base = 1 / fps
            codec.colorspace, codec.color_range = BT601_MATRIX, VIDEO_RANGE
            codec.color_primaries, codec.color_trc = BT709_PRIMARIES, SRGB_TRANSFER
            for index, frame in enumerate(frames):
                picture = converter.reformat(
                    av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24"),
                    format="yuv420p",
                    dst_colorspace=Colorspace.ITU601,
                    dst_color_range=VIDEO_RANGE,
                    interpolation=Interpolation.AREA | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP,
                    threads=1,
                )
                picture.pts, picture.time_base = index, 1 / fps
                container.mux(codec.encode(picture))
            container.mux(codec.encode(None))
    except av.error.FFmpegError as error:
        raise WriteError(f"the video encoder failed: {error}; no file was left") from error
    return sink.getvalue()


# Reading


def _png_text(data: bytes | mmap.mmap) -> bytes:
    start = len(PNG_SIGNATURE)
    while start + 8 <= len(data):
        end = start + 8 + int.from_bytes(data[start : start + 4])
        if data[start + 4 : start + 8] == b"tEXt":
            keyword, _, text = data[start + 8 : end].partition(b"\0")
            if keyword == METADATA_KEY.encode():
                return text
        start = end + 4
    return b""


def _mp4_comment(data: bytes | mmap.mmap) -> bytes:
    """The comment tag's text: the payload of nested boxes, some of which start with a few bytes of their own."""
    start, end = 0, len(data)
    steps = ((b"moov", 0), (b"udta", 0), (b"meta", 4), (b"ilst", 0), (b"\xa9cmt", 0), (b"data", 8))
    for wanted, preamble in steps:
        inside = next((span for kind, *span in _boxes(data, start, end) if kind == wanted), None)
        if inside is None:
            return b""
        start, end = inside[0] + preamble, inside[1]
    return data[start:end]


def _boxes(data: bytes | mmap.mmap, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Each box of an MP4 between two offsets (ISO/IEC 14496-12, 4.2): its kind, and its payload's start and end."""
    while start + 8 <= end:
        size, kind, header = int.from_bytes(data[start : start + 4]), data[start + 4 : start + 8], 8
        if size == 1:
            size, header = int.from_bytes(data[start + 8 : start + 16]), 16
        elif size == 0:
            size = end - start
        if size < header:
            return
        yield kind, start + header, min(start + size, end)
        start += size
