"""What is left when writing a result goes wrong."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from safelight.errors import OutputError, WriteError
from safelight.media import save_result
from safelight.naming import default_stem
from tests.unit.media_results import PROGRAM, PROMPT, clip, names, planned, result_of, still

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
