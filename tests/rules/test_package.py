"""The wheel holds all of the package, its data included, and its settings mean what they say."""

import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

import safelight
from tests.rules.source import PACKAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MOST_BYTES = 16 * 2**20  # the demo checkpoint's share


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.startswith("safelight/")}
    here = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == here
    assert "safelight/py.typed" in packed
    assert any(name.startswith("safelight/platforms/machines/") for name in packed)


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    folder = f"safelight-{safelight.__version__}.dist-info"
    metadata = wheel.read(f"{folder}/METADATA").decode()
    for line in ("Name: safelight", f"Version: {safelight.__version__}", "License-Expression: Apache-2.0"):
        assert f"\n{line}\n" in metadata
    assert "safelight = safelight.cli.main:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_demo_checkpoint_is_small() -> None:
    sizes = [path.stat().st_size for path in (PACKAGE / "demo" / "checkpoint").rglob("*") if path.is_file()]
    assert sum(sizes) <= MOST_BYTES


def test_dependencies_have_a_floor() -> None:
    """And torchvision isn't one: it has to match torch's build, and nothing here needs it."""
    requirements = PROJECT["project"]["dependencies"]
    assert [line for line in requirements if not re.search(r">=\d", line)] == []
    everything = [
        *requirements,
        *(line for extra in PROJECT["project"]["optional-dependencies"].values() for line in extra),
    ]
    assert [line for line in everything if re.match(r"torch(vision|audio)\b", line)] == []
    assert set(PROJECT["project"]["optional-dependencies"]) == {"dev", "serve"}


def test_the_torch_that_setup_names_is_in_the_declared_range() -> None:
    pinned = re.search(r'"torch==([\d.]+)"', (ROOT / "scripts/setup").read_text(encoding="utf-8"))
    (declared,) = [line for line in PROJECT["project"]["dependencies"] if re.match(r"torch\b", line)]
    low, high = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", declared).groups()  # type: ignore[union-attr]
    assert pinned
    assert as_numbers(low) <= as_numbers(pinned[1]) < as_numbers(high)


def as_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_strictness_is_on() -> None:
    """Turning one of these off would leave everything green."""
    tool = PROJECT["tool"]
    assert tool["pytest"]["ini_options"]["filterwarnings"][0] == "error"
    assert tool["mypy"]["strict"] is True and tool["mypy"]["files"] == ["src"]
    assert {"BLE", "D", "F", "FIX", "I", "UP"} <= set(tool["ruff"]["lint"]["select"])
    relaxed = [override for override in tool["mypy"]["overrides"] if override.get("ignore_errors")]
    assert relaxed == []


@pytest.mark.parametrize("script", ["scripts/setup", "scripts/demo", "scripts/check", "scripts/test", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / script
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o111, "it isn't executable"
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    if script in ("scripts/demo", "scripts/check", "scripts/test"):
        assert '\n"$root/scripts/setup"\n' in text


def test_the_check_lints_formats_and_types() -> None:
    lines = (ROOT / "scripts/check").read_text(encoding="utf-8").splitlines()
    for line in (".venv/bin/ruff check .", ".venv/bin/ruff format --check .", ".venv/bin/python -m mypy"):
        assert line in lines
