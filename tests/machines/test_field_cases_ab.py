"""Field cases of platforms on the real program: broken packages, and a diagnosis where almost nothing is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.site_packages import install

# By package: its distribution, the file that breaks, how, and what a person is told. None needs another package.
BROKEN = {
    "flash_attn_2": (
        "flash-attn",
        "flash_attn/__init__.py",
        "raise ImportError('undefined symbol: _ZN3c105ErrorC2\\nmore')",
        "ImportError: undefined symbol: _ZN3c105ErrorC2",
    ),
    "flash_attn_3": (
        "flash-attn-3",
        "flash_attn_interface.py",
        "VERSION = '2.8.0.post2'",
        "AttributeError: module 'flash_attn_interface' has no attribute 'flash_attn_func'",
    ),
    "xformers": (
        "xformers",
        "xformers/__init__.py",
        "raise RuntimeError('built for another torch')",
        "RuntimeError: built for another torch",
    ),
    "amd_aiter": ("amd-aiter", "aiter/__init__.py", "raise SystemExit('no GPU')", "SystemExit: no GPU"),
    "xpu_flash": (
        "vllm-xpu-kernels",
        "vllm_xpu_kernels/__init__.py",
        "raise OSError('libsycl.so.8: cannot open')",
        "OSError: libsycl.so.8: cannot open",
    ),
}
# The file by which a package is told from others of its name.
OWNED = {"flash_attn_2": "flash_attn/flash_attn_interface.py", "amd_aiter": "aiter/ops/mha.py"}


def run(*arguments: str, env: dict[str, str] | None = None, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("SAFELIGHT_")}
    return subprocess.run(
        [sys.executable, "-m", "safelight", *arguments],
        env=base if env is None else env,
        cwd=cwd,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modules in which every kernel package is installed, and none can be imported."""
    site = tmp_path_factory.mktemp("site")
    for key, (dist, path, code, _) in BROKEN.items():
        owned = {OWNED[key]: ""} if key in OWNED else {}
        install(site, dist, version="9.0", files={path: code, **owned})
    return site


def test_dx_023_doctor_names_each_cause_and_goes_on(broken_site, tmp_path) -> None:
    ran = run("doctor", "--json", env={**os.environ, "PYTHONPATH": str(broken_site)}, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    packages = document["machine"]["packages"]
    assert {key: packages[key]["import_error"] for key in BROKEN} == {key: row[-1] for key, row in BROKEN.items()}
    assert {finding["backend"]: finding["state"] for finding in document["backends"]}["sdpa"] == "usable"


def test_dx_023_packages_that_nobody_asked_for_stop_no_run(broken_site, tmp_path) -> None:
    env = {**os.environ, "PYTHONPATH": str(broken_site), "OMP_NUM_THREADS": "1"}
    arguments = ("generate", "a red circle", "--frames", "1", "--steps", "1", "--json", "--device", "cpu")
    ran = run(*arguments, env=env, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert {layer["backend"] for layer in document["plan"]["layers"]} == {"sdpa"}
    asked = run(*arguments, "--attention", "transformer=flash2", env=env, cwd=tmp_path)
    assert asked.returncode == 2
    assert b"flash2" in asked.stderr and b"Traceback" not in asked.stderr


BARE = {"PATH": "", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("home", [None, "locked"])
def test_dx_112_a_diagnosis_needs_neither_home_nor_path_nor_locale(home, tmp_path) -> None:
    env = dict(BARE)
    if home is not None:
        (tmp_path / home).mkdir(mode=0o555)
        env["HOME"] = str(tmp_path / home)
    ran = run("doctor", "--json", env=env, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout.decode("ascii"))
    assert document["machine"]["platform"] in ("cpu", "cuda", "rocm", "npu", "xpu", "musa", "mps")
    assert document["wrong_settings"] == []
    assert [path.name for path in tmp_path.rglob("*")] == ([] if home is None else [home]), "it left something"


@pytest.mark.parametrize("code", ["raise ImportError('libcudart.so.12')", "raise OSError('libcudart.so.12')"])
def test_dx_112_without_a_torch_the_answer_is_the_cause(code, tmp_path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    env = {**BARE, "PYTHONPATH": str(tmp_path)}
    for command in (("doctor", "--json"), ("facts",)):
        ran = run(*command, env=env, cwd=tmp_path)
        assert ran.returncode == 1
        assert b"libcudart.so.12" in ran.stderr and b"Traceback" not in ran.stderr
    assert json.loads(run("doctor", "--json", env=env, cwd=tmp_path).stdout)["error"]["error"] == "SafelightError"
    for command in (("doctor", "--machine", "h100", "--json"), ("explain", "--machine", "h100", "--json")):
        ran = run(*command, env=env, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["machine"]["platform"] == "cuda"


def test_dx_112_help_waits_for_no_torch(tmp_path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    for arguments in (["--help"], ["--version"], ["doctor", "--help"], ["facts", "--help"], ["explain", "--help"]):
        ran = run(*arguments, env={**BARE, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, b"")
