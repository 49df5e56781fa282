"""scripts/setup with a stand-in Python that writes down what it is asked: what it installs, when, and when nothing."""

import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rules.source import ROOT

# Answers as Python does where setup asks: `-c` (is it new enough, what version), `-V`, `-m venv`, `-m pip`.
STAND_IN = """#!/bin/sh
case "$1" in
    -c) echo "${STAND_IN_VERSION:-3.11}"; exit "${STAND_IN_STATUS:-0}" ;;
    -V) echo "Python ${STAND_IN_VERSION:-3.11}.5" ;;
    -m)
        echo "$@" >>"$STAND_IN_LOG"
        if [ "$2" = venv ]; then rm -rf "$4"; mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; fi
        if [ "$2" = pip ]; then exit "${STAND_IN_PIP:-0}"; fi ;;
esac
"""


@dataclass
class Clone:
    """A clone with nothing in it but what setup reads."""

    folder: Path
    bin: Path
    log: Path

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run it from elsewhere, with only the stand-in and the shell's own tools to be found."""
        environment = {"PATH": str(self.bin), "STAND_IN_LOG": str(self.log), **variables}
        return subprocess.run(
            [self.folder / "scripts/setup"], env=environment, cwd="/", capture_output=True, text=True, timeout=60
        )

    def asked(self) -> list[str]:
        """What Python was asked to do since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.replace("--quiet --disable-pip-version-check --no-compile ", "") for line in lines]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    folder = tmp_path / "a clone with spaces"
    tools = tmp_path / "bin"
    (folder / "scripts").mkdir(parents=True)
    tools.mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "scripts/setup", folder / "scripts")
    for tool in ("bash", "cat", "cp", "dirname", "env", "head", "mkdir", "mv", "rm", "sh"):
        (tools / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    (tools / "python3").write_text(STAND_IN)
    (tools / "python3").chmod(0o755)
    return Clone(folder, tools, tmp_path / "log")


def test_the_first_time_makes_and_fills_a_venv(clone: Clone) -> None:
    done = clone.setup()
    assert done.returncode == 0, done.stderr
    assert clone.asked() == [f"-m venv --clear {clone.folder}/.venv", "-m pip install torch==2.13.0 --editable .[dev]"]


def test_the_second_time_does_nothing_and_quickly(clone: Clone) -> None:
    clone.setup()
    clone.asked()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = clone.setup()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, which a busy machine stretches little.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.25
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert clone.asked() == []


@pytest.mark.parametrize("file", ["pyproject.toml", "scripts/setup"])
def test_a_change_of_what_is_needed_installs_again(clone: Clone, file: str) -> None:
    clone.setup()
    clone.asked()
    with open(clone.folder / file, "a") as changed:
        changed.write("# changed\n")
    clone.setup()
    assert clone.asked() == ["-m pip install torch==2.13.0 --editable .[dev]"]
    clone.setup()
    assert clone.asked() == []


def test_an_install_that_failed_is_tried_again(clone: Clone) -> None:
    assert clone.setup(STAND_IN_PIP="3").returncode == 3
    clone.asked()
    assert clone.setup().returncode == 0
    assert clone.asked() == ["-m pip install torch==2.13.0 --editable .[dev]"]


def test_the_torch_asked_for_is_remembered(clone: Clone) -> None:
    clone.setup(SAFELIGHT_TORCH="torch==2.9.1 --pre")
    assert clone.asked()[-1] == "-m pip install torch==2.9.1 --pre --editable .[dev]"
    clone.setup()
    assert clone.asked() == []
    with open(clone.folder / "pyproject.toml", "a") as changed:
        changed.write("# changed\n")
    clone.setup()
    assert clone.asked() == ["-m pip install torch==2.9.1 --pre --editable .[dev]"]
    clone.setup(SAFELIGHT_TORCH="default")
    assert clone.asked() == ["-m pip install torch==2.13.0 --editable .[dev]"]


@pytest.mark.parametrize("tool", ["nvidia-smi", "rocminfo"])
def test_a_machine_with_an_accelerator_gets_pip_s_choice(clone: Clone, tool: str) -> None:
    (clone.bin / tool).symlink_to("/bin/true")
    clone.setup()
    assert clone.asked()[-1] == "-m pip install --editable .[dev]"


def test_a_venv_made_by_hand_is_completed_not_replaced(clone: Clone) -> None:
    (clone.folder / ".venv/bin").mkdir(parents=True)
    shutil.copy(clone.bin / "python3", clone.folder / ".venv/bin/python")
    clone.setup()
    assert clone.asked() == ["-m pip install torch==2.13.0 --editable .[dev]"]


@pytest.mark.parametrize("what", ["moved", "another Python", "Python is gone"])
def test_a_venv_that_no_longer_fits_is_made_again(clone: Clone, what: str) -> None:
    clone.setup()
    clone.asked()
    variables = {}
    if what == "moved":
        clone.folder = clone.folder.rename(clone.folder.with_name("moved"))
    elif what == "another Python":
        variables = {"STAND_IN_VERSION": "3.12"}
    else:
        os.remove(clone.folder / ".venv/bin/python")
    clone.setup(**variables)
    assert clone.asked()[0] == f"-m venv --clear {clone.folder}/.venv"


@pytest.mark.parametrize("named", [False, True])
def test_an_old_python_is_refused_and_nothing_is_made(clone: Clone, named: bool) -> None:
    variables = {"SAFELIGHT_PYTHON": str(clone.bin / "python3")} if named else {}
    done = clone.setup(STAND_IN_STATUS="1", STAND_IN_VERSION="3.9", **variables)
    assert done.returncode == 1
    assert "Python 3.11 or later" in done.stderr
    assert f"{clone.bin / 'python3' if named else 'python3'}: Python 3.9.5" in done.stderr
    assert "SAFELIGHT_PYTHON=/path/to/python scripts/setup" in done.stderr
    assert clone.asked() == []
    assert not (clone.folder / ".venv").exists()
