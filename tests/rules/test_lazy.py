"""Importing costs and does nothing: no torch before it is needed, no file, thread, setting or registration."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.source import PACKAGE, ROOT, modules

# What may import torch at module top. All else answers questions about machines, requests, checkpoints and plans by
# itself, and stands between a person and the first line of output.
TORCH = re.compile(
    r"safelight\.(attention\.(contract|flash|guard|layer|masks|merging|packed|parallel|reference|runtime|timing|verify)"
    r"|(demo|distributed|layers|sampling)(\..*)?"
    r"|pipelines\.[^.]*\.pipeline"
    r"|models\.(?!.*_config$).*"
    r"|weights\.loading)"
)
NAMES = [module.name for module in modules()]
LIGHT = [name for name in NAMES if not TORCH.fullmatch(name)]

# Anything that a light module could only import by mistake.
HEAVY = (
    *("av", "diffusers", "ftfy", "huggingface_hub", "numpy", "PIL", "safetensors"),
    *("tokenizers", "torch", "tqdm", "transformers"),
)
COMMANDS = (["--help"], *([name, "--help"] for name in ("generate", "explain", "doctor", "facts", "bench")))
COMMAND = Path(sys.executable).parent / "safelight"


def heavy_after(code: str) -> list[str]:
    """Which heavy packages are loaded after running `code` in a process of its own."""
    report = f"import sys; print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, cwd=ROOT / "tests", timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = done.stderr.strip().splitlines()[-1]
    return list(json.loads(found.replace("'", '"')))


def test_the_probe_sees_a_heavy_import() -> None:
    assert heavy_after("import numpy") == ["numpy"]


def test_import_safelight_is_light() -> None:
    assert heavy_after("import safelight; dir(safelight); safelight.__version__; safelight.Request(prompt='x')") == []


def test_light_modules_import_nothing_heavy() -> None:
    code = f"""
import importlib, sys
for name in {LIGHT!r}:
    importlib.import_module(name)
    found = sorted(set({HEAVY!r}) & set(sys.modules))
    assert not found, f"{{name}} imports {{found}}"
"""
    assert heavy_after(code) == []


@pytest.mark.skipif(not (PACKAGE / "cli/main.py").exists(), reason="there is no command yet")
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_help_is_light(arguments: list[str]) -> None:
    code = f"from safelight.cli.main import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass"
    assert heavy_after(code) == []


@pytest.mark.skipif(not COMMAND.exists(), reason="the package isn't installed: run scripts/setup")
def test_help_takes_less_than_half_a_second() -> None:
    """In processor time, which a busy machine stretches little; the best of three."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([COMMAND, "--help"], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 0.5


def test_selection_for_every_described_machine_is_light() -> None:
    code = """
from safelight.attention import AttentionRequirements, select_backend
from safelight.platforms import load_machine, machine_names
requirements = AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12)
for name in machine_names():
    assert select_backend(requirements, load_machine(name)).backend
assert machine_names()
"""
    assert heavy_after(code) == []


def test_planning_a_model_for_a_described_machine_is_light() -> None:
    code = """
from safelight.attention import declared_backends
from safelight.planning import plan_model, published_models
from safelight.platforms import load_machine
for model in (None, *published_models()):
    assert plan_model(model, load_machine("mi300x-rocm7-aiter"), declared_backends()).layers
"""
    assert heavy_after(code) == []


def what_importing_does(names: list[str]) -> list[str]:
    beforehand = sorted(
        {
            item.target
            for module in modules()
            if module.name in names
            for item in module.imports
            if item.when == "top" and item.distribution != "safelight"
        }
    )
    done = subprocess.run(
        [sys.executable, "-B", Path(__file__).with_name("import_watch.py")],
        input=json.dumps([beforehand, names]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_importing_does_nothing_else() -> None:
    names = [name for name in NAMES if not name.startswith("safelight.demo")]
    assert what_importing_does(names) == []


@pytest.mark.slow
def test_importing_the_training_programs_does_nothing_else() -> None:
    assert what_importing_does([name for name in NAMES if name.startswith("safelight.demo")]) == []


def test_the_watch_sees_what_importing_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noisy.py").write_text(
        "import os, threading\n"
        "open(__file__ + '.txt', 'w').close()\n"
        "open(__file__ + '.txt').close()\n"
        "os.environ['NOISY'] = '1'\n"
        "threading.Thread(target=print, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = " ".join(what_importing_does(["noisy"]))
    for trace in ("noisy.py.txt (w)", "noisy.py.txt (r)", "changed environment", "started a thread"):
        assert trace in found
