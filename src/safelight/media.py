"""Results as files: one frame becomes a PNG, more an MP4, written whole, under a free name, with their origin inside.

A file is encoded in memory, written under a temporary name in its own directory, then linked to its final name: a final
name never holds part of a file, and nothing is overwritten by accident. Each file carries one JSON document, which is
Result.to_json() as it would be had this output been generated alone, in the PNG's tEXt chunk "safelight" or the MP4's
"comment" tag.
"""

import contextlib
import dataclasses
import errno
import io
import json
import mmap
import os
import re
import secrets
import stat
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safelight import __version__
from safelight.errors import OutputError, RequestError, WriteError
from safelight.request import Output, Result

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

METADATA_KEY = "safelight"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

# The slug's share of a default name. With seed, numbers and extension the name stays below 143 bytes, the shortest
# limit in use (eCryptfs); most file systems take 255.
SLUG_BYTES = 80

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


def plan_paths(
    out: Path | None,
    *,
    prompt: str,
    seed: int,
    num_outputs: int,
    num_frames: int,
    directory: Path,
    overwrite: bool = False,
) -> list[Path]:
    """Decide where a request's outputs will go, and raise OutputError now if they can't go there.

    `out` is the name a person gave; without a suffix it gets .png (one frame) or .mp4 (more). None takes the next free
    default name in `directory`, whatever `overwrite` says. Whether the directory can be written, and has room at all,
    is found by writing a small file there and removing it.
    """
    extension = _extension(num_frames)
    if out is not None:
        paths = _asked_paths(out, extension, num_outputs, overwrite)
        _check_writable(out.parent)
        return paths
    _check_writable(directory)
    stem = default_stem(prompt, seed)
    return _default_paths(directory, stem, _next_number(directory, stem), extension, num_outputs)


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
    extension = _extension(result.outputs[0].num_frames)
    asked = None if path is None else _asked_paths(path, extension, num_outputs, overwrite)
    folder = path.parent if path is not None else directory or Path()
    files = [_encode(output, _document(result, output)) for output in result.outputs]
    with contextlib.ExitStack() as cleanup:
        temporaries = [_write_temporary(folder, file, cleanup) for file in files]
        if asked is None:
            assert result.request.seed is not None, "a result's request has no None left"
            stem = default_stem(result.request.prompt, result.request.seed)
            number = _next_number(folder, stem)
            while not _publish(temporaries, paths := _default_paths(folder, stem, number, extension, num_outputs)):
                number += 1
        elif not _publish(temporaries, paths := asked, overwrite=overwrite):
            raise OutputError(f"{path} was taken by another file meanwhile; choose another name", path=str(path))
    return dataclasses.replace(
        result, outputs=tuple(dataclasses.replace(o, path=p) for o, p in zip(result.outputs, paths, strict=True))
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """The document inside a PNG or MP4 that Safelight wrote, with the file's present path as its output's path.

    Its keys are "safelight" (the version that wrote it), and from Result.to_json() "outputs" (this one), "plan",
    "request" and "warnings". Raises RequestError for a file that can't be read or has no such document.
    """
    remedy = "give a PNG or MP4 as safelight wrote it"
    try:
        with open(path, "rb") as file:
            # A map, since a file that isn't ours may be larger than memory; an empty file can't be mapped.
            is_empty = os.fstat(file.fileno()).st_size == 0
            data = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise RequestError(f"can't read {path}: {_cause(error)}; {remedy}", path=str(path)) from error
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


# Names


def default_stem(prompt: str, seed: int) -> str:
    """A file name's start made of the prompt's letters and digits, in any script, and the seed.

    At most SLUG_BYTES bytes of the prompt; nothing hidden, reserved or special to a shell or a file system is left.
    """
    slug = ""
    for character in unicodedata.normalize("NFC", prompt[: 8 * SLUG_BYTES]).lower():
        category = unicodedata.category(character)
        # Marks are vowels and accents in many scripts, but alone, or choosing an emoji's look, they would be invisible.
        is_mark = category in ("Mn", "Mc") and not unicodedata.name(character, "").startswith("VARIATION SELECTOR")
        if category[0] in "LN" or (is_mark and slug and not slug.endswith("-")):
            slug += character
        elif slug and not slug.endswith("-"):
            slug += "-"
    encoding = sys.getfilesystemencoding()
    encoded = slug.encode(encoding, "ignore")
    slug = encoded[:SLUG_BYTES].decode(encoding, "ignore")
    if len(encoded) > SLUG_BYTES and "-" in slug[len(slug) // 2 :]:
        slug = slug.rpartition("-")[0]
    return f"{slug.strip('-') or 'untitled'}-seed{seed}"


def _extension(num_frames: int) -> str:
    return ".png" if num_frames == 1 else ".mp4"


def _numbered(path: Path, num_outputs: int) -> list[Path]:
    if num_outputs == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{index}{path.suffix}") for index in range(num_outputs)]


def _default_paths(folder: Path, stem: str, number: int, extension: str, num_outputs: int) -> list[Path]:
    name = stem if number == 1 else f"{stem}_{number}"
    return _numbered(folder / f"{name}{extension}", num_outputs)


def _next_number(folder: Path, stem: str) -> int:
    """One more than the highest number in use, so that a gap left by a deleted file isn't filled by a newer one."""
    pattern = re.compile(rf"{re.escape(stem)}(?:_(\d{{1,9}}))?(?:-\d+)?\.(?:png|mp4)", re.IGNORECASE)
    try:
        matches = [pattern.fullmatch(name) for name in os.listdir(folder)]
    except OSError as error:
        raise _unwritable(folder, error) from error
    return 1 + max((int(match[1] or 1) for match in matches if match), default=0)


def _asked_paths(out: Path, extension: str, num_outputs: int, overwrite: bool) -> list[Path]:
    """The names for a path that a person gave, or OutputError with everything that is wrong with them."""
    try:
        is_folder = stat.S_ISDIR(os.stat(out).st_mode)
    except OSError:
        is_folder = False
    except ValueError as error:
        raise OutputError(f"{str(out)!r} can't be a file name: {error}", path=str(out)) from error
    if is_folder:
        raise OutputError(
            f"{out} is a directory; give a file name, such as {out / ('name' + extension)}", path=str(out)
        )
    stem, suffix = os.path.splitext(out.name)
    problems = []
    if suffix in ("", "."):
        out = out.with_name(stem + extension)
    elif suffix.lower() != extension:
        content = "one frame is a PNG" if extension == ".png" else "more than one frame is an MP4"
        problems.append(f"{out} ends in {suffix}; {content}, so the name must end in {extension} or have no suffix")
    paths = _numbered(out, num_outputs)
    problems += [problem for path in paths if (problem := _target_problem(path, overwrite))]
    if problems:
        raise OutputError("; ".join(problems), path=str(out))
    return paths


def _target_problem(path: Path, overwrite: bool) -> str | None:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{path} can't be used: {_cause(error)}; choose another name"
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        return f"{path} exists and isn't a file; choose another name"
    if not overwrite:
        return f"{path} exists already; choose another name, or pass --overwrite to replace it"
    return None


def _check_writable(folder: Path) -> None:
    """Raise OutputError unless a block can be written in the directory; permission bits alone don't tell."""
    with contextlib.ExitStack() as cleanup:
        try:
            _write_temporary(folder, bytes(4096), cleanup)
        except WriteError as error:
            raise OutputError(error.message, **error.details) from error


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"can't write in directory {folder}: {_cause(error)}; choose one that exists and can be written",
        path=str(folder),
        errno=errno.errorcode.get(error.errno or 0),
    )


def _cause(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# Whole writes


def _write_temporary(folder: Path, data: bytes, cleanup: contextlib.ExitStack) -> Path:
    """Write a file under a temporary name, which `cleanup` removes."""
    path = folder / f".safelight-{secrets.token_hex(8)}.tmp"
    cleanup.callback(_discard, path)
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        path.write_bytes(data)
    except OSError as error:
        raise _write_error(folder, error) from error
    return path


def _write_error(path: Path, error: OSError) -> WriteError:
    return WriteError(
        f"writing to {path} failed: {_cause(error)}; no file was left. Make room, or write somewhere else",
        path=str(path),
        errno=errno.errorcode.get(error.errno or 0),
    )


def _publish(temporaries: Sequence[Path], paths: Sequence[Path], *, overwrite: bool = False) -> bool:
    """Give files their final names, all or none; False means that one of the names is taken."""
    try:
        with contextlib.ExitStack() as undo:
            for temporary, path in zip(temporaries, paths, strict=True):
                if overwrite:
                    os.replace(temporary, path)
                else:
                    undo.callback(_withdraw, path, os.stat(temporary))
                    _place(temporary, path)
            undo.pop_all()
    except FileExistsError:
        return False
    except OSError as error:
        raise _write_error(paths[0], error) from error
    return True


def _place(temporary: Path, path: Path) -> None:
    """Name a file without replacing one: of several processes that try, one succeeds and the others see the name taken.

    Some file systems have no hard links (FAT, a few network ones). There an empty file reserves the name first.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        with contextlib.ExitStack() as undo:
            path.touch(exist_ok=False)
            undo.callback(_discard, path)
            os.replace(temporary, path)
            undo.pop_all()


def _withdraw(path: Path, ours: os.stat_result) -> None:
    """Remove a name if it stands for our file, and not for one that was there before."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), ours):
            os.unlink(path)


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


# Encoding


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
    # ASCII, with \u escapes: any text survives every reader, half surrogate pairs and NUL included.
    return json.dumps(document, separators=(",", ":"))


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
