"""Reading a model's small files: JSON objects, and words for what is wrong with a file."""

import json
import os
from pathlib import Path
from typing import Any

from safelight.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_PROBLEM = "a git-lfs pointer, not the file itself: run `git lfs pull` in the model's folder, or download it again"


def unreadable(path: Path, error: OSError) -> str:
    """Why a file can't be read, in a few words. "missing" means exactly that nothing is there."""
    if not isinstance(error, FileNotFoundError):
        return (error.strerror or type(error).__name__).lower()
    if path.is_symlink():
        return f"missing: a symlink to {os.readlink(path)}, which isn't there"
    return "missing"


def parse_object(data: bytes, where: Path) -> dict[str, Any]:
    """The JSON object in some bytes. Raises CheckpointError naming `where`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: malformed JSON: {error}", path=str(where)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(value).__name__}, not an object", path=str(where))
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, such as a component's config.json. Raises CheckpointError naming the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {unreadable(path, error)}", path=str(path)) from error
    if not data:
        raise CheckpointError(f"{path}: empty (zero bytes)", path=str(path))
    if data.startswith(LFS_POINTER):
        raise CheckpointError(f"{path}: {LFS_PROBLEM}", path=str(path))
    return parse_object(data, path)
