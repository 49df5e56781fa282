"""A safetensors file's header, read and checked against the file's size without touching the tensors.

The format: 8 bytes with the header's length (little-endian), the header as a JSON object (name: dtype, shape,
data_offsets), then the tensors' bytes without gaps. https://github.com/huggingface/safetensors#format
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safelight.errors import CheckpointError
from safelight.weights.reading import LFS_POINTER, LFS_PROBLEM, parse_object, unreadable

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "U16": 16,
        "I16": 16,
        "U32": 32,
        "I32": 32,
        "U64": 64,
        "I64": 64,
        "F16": 16,
        "BF16": 16,
        "F32": 32,
        "F64": 64,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
    }
)
_LENGTH_BYTES = 8
_HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit; text read as a length is far above it
_CHUNK_BYTES = 1 << 20
_REMEDY = "download it again"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor in a file: dtype in the format's spelling ("BF16"), shape, and half-open byte range in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file, by name.

    Raises CheckpointError that names the file and what is wrong: "missing", "empty (zero bytes)", "truncated: N of M
    bytes", "a git-lfs pointer" or "bad header". Reads the header alone, so it costs the same for any file size.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(max(_LENGTH_BYTES, len(LFS_POINTER)))
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            problem = _problem_at_start(start, length, size)
            if problem is not None:
                raise CheckpointError(f"{file}: {problem}", path=str(file))
            stream.seek(_LENGTH_BYTES)
            data = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: {unreadable(file, error)}", path=str(file)) from error
    try:
        table = parse_object(data, file)
    except CheckpointError as error:
        raise CheckpointError(f"{error.message} (bad header)", path=str(file)) from error
    table.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, _LENGTH_BYTES + length) for name, value in table.items()}
    _check_ranges(file, entries, _LENGTH_BYTES + length, size)
    return entries


def same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two stored tensors are equal bit for bit, dtype and shape included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.begin)
        right.seek(other.begin)
        remaining = one.end - one.begin
        while remaining > 0:
            step = min(_CHUNK_BYTES, remaining)
            if left.read(step) != right.read(step):
                return False
            remaining -= step
    return True


def _problem_at_start(start: bytes, length: int, size: int) -> str | None:
    if size == 0:
        return f"empty (zero bytes); {_REMEDY}"
    if start.startswith(LFS_POINTER):
        return LFS_PROBLEM
    if size < _LENGTH_BYTES:
        return f"truncated: {size} bytes, fewer than a header's length takes; {_REMEDY}"
    if length > _HEADER_LIMIT_BYTES or start[_LENGTH_BYTES : _LENGTH_BYTES + 1] not in (b"{", b""):
        return f"bad header: not a safetensors file (starts with {start[:16]!r})"
    if _LENGTH_BYTES + length > size:
        return f"truncated: {size} of at least {_LENGTH_BYTES + length} bytes; {_REMEDY}"
    return None


def _entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    """One header entry, checked on its own."""
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if _are_sizes(
            [*shape, begin, end]
        ):
            stored = 8 * (end - begin)
            # A dtype newer than this table is somebody else's to refuse, by name; its size can't be checked here.
            expected = math.prod(shape) * DTYPE_BITS[dtype] if dtype in DTYPE_BITS else stored
            if stored == expected and begin <= end:
                return TensorEntry(
                    file=file, dtype=dtype, shape=tuple(shape), begin=data_start + begin, end=data_start + end
                )
            raise CheckpointError(
                f"{file}: bad header: tensor {name!r} is {dtype} {shape}, which bytes {begin} to {end} don't hold",
                path=str(file),
            )
    raise CheckpointError(
        f"{file}: bad header: tensor {name!r} must have dtype, shape and data_offsets, and has {value!r:.200}",
        path=str(file),
    )


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check_ranges(file: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors must fill the file from the header to the end, without overlaps and gaps."""
    expected_size = max((entry.end for entry in entries.values()), default=data_start)
    position, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            what = "overlap" if entry.begin < position else "leave a gap"
            raise CheckpointError(f"{file}: bad header: {previous} and tensor {name!r} {what}", path=str(file))
        position, previous = entry.end, f"tensor {name!r}"
    if size < expected_size:
        raise CheckpointError(f"{file}: truncated: {size} of {expected_size} bytes; {_REMEDY}", path=str(file))
    if size > expected_size:
        raise CheckpointError(
            f"{file}: bad header: it describes {expected_size} bytes, and the file has {size}", path=str(file)
        )
