"""Where results go: default names made of prompt and seed, asked names checked, and a first file written there."""

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from safelight.errors import OutputError, WriteError

# The slug's share of a default name. With seed, numbers and extension the name stays below 143 bytes, the shortest
# limit in use (eCryptfs); most file systems take 255.
SLUG_BYTES = 80


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
    extension = extension_for(num_frames)
    if out is not None:
        paths = asked_paths(out, extension, num_outputs, overwrite)
        check_writable(out.parent)
        return paths
    check_writable(directory)
    stem = default_stem(prompt, seed)
    return default_paths(directory, stem, next_number(directory, stem), extension, num_outputs)


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


def extension_for(num_frames: int) -> str:
    """The suffix of a still or of a clip."""
    return ".png" if num_frames == 1 else ".mp4"


def numbered(path: Path, num_outputs: int) -> list[Path]:
    """The names of several outputs: name-0, name-1, ..."""
    if num_outputs == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{index}{path.suffix}") for index in range(num_outputs)]


def default_paths(folder: Path, stem: str, number: int, extension: str, num_outputs: int) -> list[Path]:
    """The default names that a number gives; the first run's has none."""
    name = stem if number == 1 else f"{stem}_{number}"
    return numbered(folder / f"{name}{extension}", num_outputs)


def next_number(folder: Path, stem: str) -> int:
    """One more than the highest number in use, so that a gap left by a deleted file isn't filled by a newer one."""
    pattern = re.compile(rf"{re.escape(stem)}(?:_(\d{{1,9}}))?(?:-\d+)?\.(?:png|mp4)", re.IGNORECASE)
    try:
        matches = [pattern.fullmatch(name) for name in os.listdir(folder)]
    except OSError as error:
        raise unwritable(folder, error) from error
    return 1 + max((int(match[1] or 1) for match in matches if match), default=0)


def asked_paths(out: Path, extension: str, num_outputs: int, overwrite: bool) -> list[Path]:
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
    paths = numbered(out, num_outputs)
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
        return f"{path} can't be used: {cause_of(error)}; choose another name"
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        return f"{path} exists and isn't a file; choose another name"
    if not overwrite:
        return f"{path} exists already; choose another name, or pass --overwrite to replace it"
    return None


def check_writable(folder: Path) -> None:
    """Raise OutputError unless a block can be written in the directory; permission bits alone don't tell."""
    with contextlib.ExitStack() as cleanup:
        try:
            write_temporary(folder, bytes(4096), cleanup)
        except WriteError as error:
            raise OutputError(error.message, **error.details) from error


def unwritable(folder: Path, error: OSError) -> OutputError:
    """The error for a directory that takes no file."""
    return OutputError(
        f"can't write in directory {folder}: {cause_of(error)}; choose one that exists and can be written",
        path=str(folder),
        errno=errno.errorcode.get(error.errno or 0),
    )


def cause_of(error: OSError | ValueError) -> str:
    """The operating system's words for an error."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# Whole writes


def write_temporary(folder: Path, data: bytes, cleanup: contextlib.ExitStack) -> Path:
    """Write a file under a temporary name, which `cleanup` removes."""
    path = folder / f".safelight-{secrets.token_hex(8)}.tmp"
    cleanup.callback(discard, path)
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        path.write_bytes(data)
    except OSError as error:
        raise write_error(folder, error) from error
    return path


def write_error(path: Path, error: OSError) -> WriteError:
    """The error for a write that failed."""
    return WriteError(
        f"writing to {path} failed: {cause_of(error)}; no file was left. Make room, or write somewhere else",
        path=str(path),
        errno=errno.errorcode.get(error.errno or 0),
    )


def discard(path: Path) -> None:
    """Remove a file of ours, if it is still there."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def publish(temporaries: Sequence[Path], paths: Sequence[Path], *, overwrite: bool = False) -> bool:
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
        raise write_error(paths[0], error) from error
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
            undo.callback(discard, path)
            os.replace(temporary, path)
            undo.pop_all()


def _withdraw(path: Path, ours: os.stat_result) -> None:
    """Remove a name if it stands for our file, and not for one that was there before."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), ours):
            os.unlink(path)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise OutputError where a file of that name can't be written, or is there already and may not be replaced."""
    problem = f"{path} is a directory; give a file name" if path.is_dir() else _target_problem(path, overwrite)
    if problem:
        raise OutputError(problem, path=str(path))
    check_writable(path.parent)


def write_whole(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a text file whole or not at all. Raises OutputError and WriteError."""
    check_target(path, overwrite=overwrite)
    with contextlib.ExitStack() as cleanup:
        temporary = write_temporary(path.parent, text.encode(), cleanup)
        if not publish([temporary], [path], overwrite=overwrite):
            raise OutputError(f"{path} was taken by another file meanwhile; choose another name", path=str(path))
