"""`safelight doctor --verify`: usable backends held to the reference, with an exit status that says how it went."""

import json

import pytest

from safelight.cli.main import main
from tests.unit.site_packages import install

BROKEN = """
import dataclasses
from safelight.attention.backends.sdpa import BACKEND as SDPA


def load(requirements):
    kernel = SDPA.load(requirements)

    def off(q, k, v, *, scale=None, **options):
        return kernel(q, k, v, scale=None, **options)

    return off


BACKEND = dataclasses.replace(SDPA, name="off", aliases=(), load=load, lse=False, packed_varlen=False)
"""


def verify(capfd, *arguments):
    status = main(["doctor", "--verify", "--device", "cpu", *arguments])
    printed = capfd.readouterr()
    return status or 0, printed


@pytest.mark.slow
def test_sdpa_passes_in_float32_and_bfloat16(capfd) -> None:
    status, printed = verify(capfd, "--backend", "sdpa")
    rows = [line.split() for line in printed.out.splitlines() if line.startswith("sdpa")]
    assert status == 0
    assert [(row[1], row[3]) for row in rows] == [("float32", "pass"), ("bfloat16", "pass")]
    assert all(int(row[2]) > 250 for row in rows)


@pytest.mark.slow
def test_a_kernel_that_drops_the_scale_fails_with_numbers(capfd, tmp_path, monkeypatch) -> None:
    points = "[safelight.backends]\noff = kernels_that_are_off:BACKEND\n"
    install(tmp_path, "off-kernels", files={"kernels_that_are_off.py": BROKEN}, entry_points=points)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, printed = verify(capfd, "--backend", "off", "--dtype", "float32", "--json")
    document = json.loads(printed.out)
    assert status == 1
    assert "scale 0.01 in float32" in printed.out and "is off by" in printed.out
    assert document["machine"]["platform"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "problem"), [(("--backend", "flash3"), "flash3"), (("--backend", "sdpaa"), "sdpa")]
)
def test_a_backend_that_can_not_run_here_is_refused_with_the_reason(capfd, arguments, problem) -> None:
    status, printed = verify(capfd, *arguments)
    assert status == 2 and problem in printed.err
