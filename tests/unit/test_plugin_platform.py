"""A platform in an outside package: the one of docs/adding-a-platform.md, installed, probed and planned for."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from safelight.attention import AttentionRequirements, declared_backends, select_backend
from safelight.errors import RequestError
from safelight.platforms import (
    DeviceFacts,
    MachineFacts,
    load_machine,
    platform_named,
    platforms,
    probe_machine,
    torch_device,
)
from tests.rules.documents import blocks
from tests.unit.fake_torch import (
    GIB,
    cuda_torch,
    every_cuda_failure,
    every_failure,
    fake_devices,
    fake_torch,
    raiser,
)
from tests.unit.site_packages import install

PAGE = Path(__file__).parents[2] / "docs/adding-a-platform.md"
BUILT_IN = [platform.name for platform in platforms()]


def code(language):
    return [block.code for block in blocks(PAGE) if block.language == language]


def acme_torch(*chips, **parts):
    """A torch into which Acme's plug-in has put its namespace, with a device for each chip."""
    acme = fake_devices(
        lambda index: SimpleNamespace(name=f"Acme {index}", total_memory=64 * GIB, chip=chips[index]), len(chips), parts
    )
    return fake_torch(acme=acme)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of modules; what is imported from it is forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in tuple(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def install_project(site, project, files):
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    return install(site, project["name"], project["version"], files=files, entry_points=points)


@pytest.fixture
def acme(site):
    """The documented package, installed."""
    module, _test = code("python")
    (path,) = re.findall(r"^`(acme_platform/\S+\.py)`:$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    (toml,) = code("toml")
    install_project(site, tomllib.loads(toml)["project"], {path: module})
    return site


def test_an_installed_platform_comes_after_the_built_in_ones(acme):
    assert [platform.name for platform in platforms()] == [*BUILT_IN, "acme"]
    assert platform_named("acme").torch_device == "acme"
    with pytest.raises(RequestError, match=f"there are {', '.join(BUILT_IN)}, acme"):
        platform_named("vulkan")


def test_its_machine_is_probed(acme):
    facts = probe_machine(torch=acme_torch("A2 rev. 3", "A1"))
    assert facts == MachineFacts(
        platform="acme",
        devices=(
            DeviceFacts(arch="acme-a2", name="Acme 0", memory_bytes=64 * GIB),
            DeviceFacts(arch="acme-a1", name="Acme 1", memory_bytes=64 * GIB),
        ),
        torch_version="2.13.0",
    )
    second = probe_machine("acme:1", torch=acme_torch("A2 rev. 3", "A1"))
    assert (second.arch, torch_device(second, "acme:1")) == ("acme-a1", "acme:1")


def test_it_takes_nothing_from_the_built_in_ones(acme):
    torch = cuda_torch((9, 0))
    torch.acme = acme_torch("A2").acme
    assert probe_machine(torch=torch).platform == "cuda"
    assert probe_machine("acme", torch=torch).platform == "acme"
    assert (probe_machine(torch=fake_torch()).platform, probe_machine(torch=fake_torch()).notes) == ("cpu", ())
    with pytest.raises(RequestError, match="isn't built for it"):
        probe_machine("acme", torch=fake_torch())


@every_cuda_failure
@pytest.mark.parametrize("function", ["is_available", "device_count", "get_device_properties"])
def test_its_broken_driver_leaves_the_cpu_and_the_cause(acme, function, error):
    torch = acme_torch("A2", **{function: raiser(error)})
    facts = probe_machine(torch=torch)
    assert facts.platform == "cpu"
    assert facts.notes[0].startswith(f"no acme device can be used, so the CPU was chosen: torch.acme.{function}(")
    assert type(error).__name__ in facts.notes[0]
    with pytest.raises(RequestError, match=type(error).__name__):
        probe_machine("acme", torch=torch)


@every_failure
def test_a_namespace_of_its_that_raises_is_a_note(acme, error):
    class Torch:
        acme = property(raiser(error))

    facts = platform_named("acme").probe(Torch())
    if isinstance(error, AttributeError):
        assert facts is None
    else:
        assert facts.devices == ()
        assert type(error).__name__ in facts.notes[0]


def test_its_described_machine_is_loaded_and_planned_for(acme, tmp_path, monkeypatch):
    (machine,) = code("json")
    (tmp_path / "machine.json").write_text(machine, encoding="utf-8")
    facts = load_machine(tmp_path / "machine.json")
    assert facts == MachineFacts.from_json(json.loads(machine))
    platform = platform_named(facts.platform)
    assert (platform.automatic_order(facts), platform.default_dtype(facts)) == (("acme", "sdpa"), "bfloat16")
    selection = select_backend(
        AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12), facts
    )
    assert (selection.backend, selection.reason) == ("sdpa", "platform default")
    monkeypatch.chdir(tmp_path)
    _module, test = code("python")
    exec(compile(test, str(PAGE), "exec"), {})


def test_a_machine_of_a_platform_that_is_not_installed_names_those_that_are(tmp_path):
    (machine,) = code("json")
    (tmp_path / "machine.json").write_text(machine, encoding="utf-8")
    with pytest.raises(RequestError, match=f"platform is 'acme', there are {', '.join(BUILT_IN)}"):
        load_machine(tmp_path / "machine.json")


def test_a_platform_and_its_backend_work_together(acme):
    """Its order names a kernel that another package, or the same one, brings."""
    backend = (
        "from safelight.attention import AttentionBackend\n"
        "BACKEND = AttentionBackend(name='acme', summary='made up', load=lambda requirements: None,\n"
        "    platforms=frozenset({'acme'}), arches={'acme': ('acme-a2',)})\n"
    )
    project = {
        "name": "acme-kernels",
        "version": "1.0",
        "entry-points": {"safelight.backends": {"acme": "acme_kernels:BACKEND"}},
    }
    install_project(acme, project, {"acme_kernels.py": backend})
    assert "acme" in declared_backends()
    need = AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12)
    for chip, expected in (("A2 rev. 1", "acme"), ("A1", "sdpa")):
        assert select_backend(need, probe_machine(torch=acme_torch(chip))).backend == expected


def test_finding_it_imports_no_torch(acme):
    program = (
        "import sys\nfrom safelight.platforms import platforms\n"
        "print([platform.name for platform in platforms()][-1], 'torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(acme), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == ["acme", "False"]


def test_an_installed_platform_goes_when_its_package_goes(acme):
    assert "acme" in [platform.name for platform in platforms()]
    for file in (acme / "acme_platform-1.0.dist-info").iterdir():
        file.unlink()
    importlib.invalidate_caches()
    assert [platform.name for platform in platforms()] == BUILT_IN


TAKEN = """
from dataclasses import replace
from safelight.platforms.cpu import PLATFORM as CPU
PLATFORM = replace(CPU, name='rocm')
"""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "raise OSError('libacme.so: cannot open shared object file\\nmore')",
            "OSError: libacme.so: cannot open shared",
        ),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("", "AttributeError: module 'acme_platform' has no attribute 'PLATFORM'"),
        ("PLATFORM = 'acme'", "it is of class str, not Platform"),
        (TAKEN, "it claims the name 'rocm', which is that of safelight.platforms.rocm"),
    ],
)
def test_dx_080_a_platform_that_fails_to_load_is_one_note(site, module, said):
    (toml,) = code("toml")
    install_project(site, tomllib.loads(toml)["project"], {"acme_platform/__init__.py": module})
    assert [platform.name for platform in platforms()] == BUILT_IN
    facts = probe_machine(torch=cuda_torch((9, 0)))
    assert facts.platform == "cuda"
    (note,) = facts.notes
    start = "the platform plug-in acme = acme_platform:PLATFORM of acme-platform 1.0 doesn't load: "
    assert note.startswith(start + said)
    assert "\n" not in note
