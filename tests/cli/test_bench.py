"""`safelight bench attention`: what it times, what it keeps, and what it refuses before anything runs."""

import json
import os
import subprocess
import sys

import pytest

from safelight.attention.requirements import MASKS
from safelight.cli import shapes
from safelight.cli.main import main

SHAPE = "tokens=64,heads=2,head_dim=32"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def bench(capfd, *arguments):
    status = main(["bench", "attention", "--device", "cpu", *arguments])
    return status, capfd.readouterr()


def test_the_words_for_masks_are_those_of_requirements() -> None:
    assert shapes.MASKS == MASKS


def test_sdpa_is_timed_against_the_machines_own_products(capfd) -> None:
    status, printed = bench(capfd, "--shape", SHAPE, "--backend", "sdpa", "--runs", "3", "--json")
    document = json.loads(printed.out)
    assert status == 0
    (found,) = document["shapes"]
    (timing,) = found["timings"]
    assert timing["backend"] == "sdpa" and timing["num_runs"] == 3
    # 4 * tokens^2 * heads * head_dim operations in the median time.
    assert timing["flops_per_s"] == pytest.approx(4 * 64 * 64 * 2 * 32 / timing["median_s"])
    assert 0 < timing["share_of_peak"] < 2


@pytest.mark.slow
def test_a_saved_ranking_decides_what_nobody_chose(tmp_path) -> None:
    """Measured, kept, used by explain, and ignored with the reason once the machine is another."""
    run = [sys.executable, "-m", "safelight"]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    saved = subprocess.run(
        [*run, "bench", "attention", "--device", "cpu", "--backend", "sdpa", "--runs", "2", "--save"],
        env=env, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert saved.returncode == 0, saved.stderr
    plan = subprocess.run([*run, "explain", "--device", "cpu", "--json"], env=env, capture_output=True, text=True)
    rows = json.loads(plan.stdout)["layers"]
    assert {row["reason"] for row in rows if row["component"] == "transformer"} == {"measured fastest"}
    (file,) = tmp_path.rglob("*.json")
    document = json.loads(file.read_text())
    fingerprint = document["fingerprint"]
    fingerprint["torch"] = "2.0.0"
    file.write_text(json.dumps(document))
    plan = subprocess.run([*run, "explain", "--device", "cpu", "--json"], env=env, capture_output=True, text=True)
    document = json.loads(plan.stdout)
    assert {row["reason"] for row in document["layers"]} == {"platform default"}
    (note,) = [note for note in document["machine"]["notes"] if "torch 2.0.0 -> " in note]
    assert "safelight bench attention --save" in note


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--shape", "tokens=0,heads=2,head_dim=32"), "tokens"),
        (("--shape", "token=5"), "did you mean tokens?"),
        (("--shape", SHAPE, "--backend", "sage9"), "no backend has this name"),
        (("--shape", "tokens=64,heads=3,kv_heads=2,head_dim=32"), "3 heads can't share 2 kv_heads evenly"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(capfd, arguments, problem) -> None:
    status, printed = bench(capfd, *arguments)
    assert status == 2 and problem in printed.err and printed.out == ""
