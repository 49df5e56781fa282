"""A safetensors header, read and checked without torch: whatever is wrong is named with the file."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from safelight.errors import CheckpointError
from safelight.weights.header import read_header, same_bytes

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def write(file: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert caught.value.details["path"] == str(file)
    assert caught.value.message.startswith(f"{file}: ")
    return caught.value.message.removeprefix(f"{file}: ")


def test_it_reads_what_the_library_wrote(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    values = {
        "scalar": np.array(3, np.float32),
        "matrix": np.arange(6, dtype=np.float16).reshape(2, 3),
        "empty": np.zeros((0, 4), np.float64),
        "ids": np.arange(5, dtype=np.int64),
    }
    save_file(values, file, metadata={"format": "pt"})
    entries = read_header(file)
    kinds = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    assert kinds == {"scalar": ("F32", ()), "matrix": ("F16", (2, 3)), "empty": ("F64", (0, 4)), "ids": ("I64", (5,))}
    stored = file.read_bytes()
    for name, entry in entries.items():
        assert entry.file == file
        assert stored[entry.begin : entry.end] == values[name].tobytes()


@pytest.mark.parametrize("share", range(1, 20))
def test_dx_016_a_file_cut_anywhere_is_truncated(tmp_path: Path, share: int) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": np.ones((4, 8), np.float32), "b": np.ones(3, np.float32)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * share // 20])
    message = refusal(file)
    assert message.startswith(f"truncated: {len(whole) * share // 20} of ")
    assert "download it again" in message
    if len(whole) * share // 20 > 8 + int.from_bytes(whole[:8], "little"):
        assert f"of {len(whole)} bytes" in message


def test_dx_016_what_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    assert refusal(file) == "missing"
    file.symlink_to("../blobs/abc")
    assert refusal(file) == "missing: a symlink to ../blobs/abc, which isn't there"
    file.unlink()
    file.write_bytes(b"")
    assert refusal(file).startswith("empty (zero bytes)")
    file.write_bytes(b"\x10\0")
    assert refusal(file).startswith("truncated: 2 bytes")
    file.write_text(POINTER)
    assert "a git-lfs pointer" in refusal(file)
    assert "git lfs pull" in refusal(file)
    for text in (
        b"<!DOCTYPE html><html></html>",
        b"PK\x03\x04 a zip, such as a pickle",
        b"\x80\x02}q\x00X\x01\x00\x00\x00",
    ):
        file.write_bytes(text)
        assert refusal(file).startswith("bad header: not a safetensors file")
    file.unlink()
    file.mkdir()
    assert refusal(file) == "is a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", {})
    file.chmod(0)
    assert refusal(file) == "permission denied"


BAD = {
    "not JSON": (b"{oops", b"", "malformed JSON"),
    "not UTF-8": (b'{"\xff\xfe": 1}', b"", "malformed JSON"),
    "not an object": (b"[1]", b"", "bad header"),
    "nested without end": (b'{"a":' + b"[" * 100_000, b"", "bad header"),
    "not a tensor": ({"a": 3}, b"", "must have dtype, shape and data_offsets"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "must have dtype"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"1234", "must have dtype"),
    "negative shape": ({"a": tensor(0, 4, [-1])}, b"1234", "must have dtype"),
    "fractional shape": ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"1234", "must have dtype"),
    "true as a size": ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234", "must have dtype"),
    "too few bytes": ({"a": tensor(0, 4, [2])}, b"1234", "which bytes 0 to 4 don't hold"),
    "too many bytes": ({"a": tensor(0, 8, [1])}, b"12345678", "which bytes 0 to 8 don't hold"),
    "backwards": ({"a": tensor(4, 0, [1])}, b"1234", "don't hold"),
    "backwards, unknown dtype": ({"a": tensor(4, 0, [1], "F3")}, b"1234", "don't hold"),
    "overlap": ({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, b"1" * 12, "tensor 'a' and tensor 'b' overlap"),
    "same place": ({"a": tensor(0, 4, [1]), "b": tensor(0, 4, [1])}, b"1234", "tensor 'a' and tensor 'b' overlap"),
    "gap": ({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, b"1" * 12, "tensor 'a' and tensor 'b' leave a gap"),
    "gap in front": ({"a": tensor(4, 8, [1])}, b"1" * 8, "the header and tensor 'a' leave a gap"),
    "more data": ({"a": tensor(0, 4, [1])}, b"1" * 8, "bytes, and the file has"),
    "beyond the end": ({"a": tensor(0, 4, [1]), "b": tensor(4, 12, [2])}, b"1" * 8, "truncated: "),
}


@pytest.mark.parametrize(("header", "data", "problem"), BAD.values(), ids=BAD.keys())
def test_dx_016_a_bad_header_says_what_is_wrong(tmp_path: Path, header: Any, data: bytes, problem: str) -> None:
    message = refusal(write(tmp_path / "a.safetensors", header, data))
    assert problem in message
    assert "bad header" in message or "truncated" in message


def test_a_header_that_claims_more_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", b"{" + b" " * 100, length=2**62)
    assert refusal(file).startswith("bad header: not a safetensors file")


def test_an_unknown_dtype_is_read_so_that_it_can_be_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", {"a": tensor(0, 3, [6], "F4")}, b"123")
    assert read_header(file)["a"].dtype == "F4"


def test_same_bytes_compares_values_dtype_and_shape(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    big = np.arange(600_000, dtype=np.float32)
    last = big.copy()
    last[-1] += 1
    save_file({"pad": np.ones(3, np.float32), "big": big, "zero": np.zeros(1, np.float32)}, one)
    save_file({"big": big, "last": last, "folded": big.reshape(2, -1), "zero": np.array([-0.0], np.float32)}, other)
    left, right = read_header(one), read_header(other)
    assert same_bytes(left["big"], right["big"])
    assert not same_bytes(left["big"], right["last"])
    assert not same_bytes(left["big"], right["folded"])
    assert not same_bytes(left["zero"], right["zero"])
