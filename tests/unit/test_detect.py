"""Asking for a device: given or refused, by numbers, without reading the environment; a broken torch; plug-ins."""

import json
import os
import subprocess
import sys

import pytest

from safelight.errors import RequestError
from safelight.platforms import MachineFacts, platform_named, probe_machine, torch_device
from tests.unit.fake_torch import cuda_torch, fake_torch, mps_torch, rocm_torch

# Asking for a device


@pytest.mark.parametrize("asked", ["CUDA", "gpu", "", " ", "cuda ", "auto", "xla", "gpu:0", ":0", "0", "spec", "é"])
def test_dx_079_an_unknown_device_is_refused_with_the_list(asked):
    with pytest.raises(RequestError) as caught:
        probe_machine(asked, torch=cuda_torch((9, 0)), source="`SAFELIGHT_DEVICE`")
    assert f"device {asked!r} (from `SAFELIGHT_DEVICE`) isn't known" in caught.value.message
    assert "there are cpu, cuda, mps, musa, npu, rocm, xpu" in caught.value.message


def test_a_misspelt_device_gets_a_suggestion():
    with pytest.raises(RequestError, match="did you mean 'cuda'"):
        probe_machine("CUDA", torch=fake_torch())
    with pytest.raises(RequestError) as caught:
        probe_machine("gpu", torch=fake_torch())
    assert "did you mean" not in caught.value.message


@pytest.mark.parametrize(
    "asked",
    ["cuda:", "cuda:x", "cuda:-1", "cuda:0,1", "cuda: 1", "cuda:01", "cuda:1:2", "cuda:²", "cuda:" + "9" * 5000],
)
def test_a_device_number_that_is_none(asked):
    with pytest.raises(RequestError, match="no device number behind its colon"):
        probe_machine(asked, torch=cuda_torch((9, 0), (9, 0)))


@pytest.mark.parametrize(
    ("torch", "here"),
    [
        (cuda_torch((9, 0)), "cuda"),
        (rocm_torch("gfx942"), "rocm"),
        (mps_torch(), "mps"),
        (fake_torch(), "cpu"),
    ],
    ids=["cuda", "rocm", "mps", "cpu"],
)
@pytest.mark.parametrize("asked", ["cuda", "rocm", "mps", "cpu"])
def test_dx_079_what_is_asked_for_is_given_or_refused(torch, here, asked):
    if asked in (here, "cpu"):
        assert probe_machine(asked, torch=torch).platform == asked
        return
    with pytest.raises(RequestError) as caught:
        probe_machine(asked, torch=torch)
    assert f"device '{asked}' can't be used" in caught.value.message
    assert f"{here} (1 x " in caught.value.message
    assert here in caught.value.details["found"]


def test_a_numbered_device_stands_alone_in_the_facts():
    torch = cuda_torch((9, 0), (8, 9))
    assert [device.arch for device in probe_machine("cuda", torch=torch).devices] == ["sm90", "sm89"]
    facts = probe_machine("cuda:1", torch=torch)
    assert [device.name for device in facts.devices] == ["NVIDIA 1"]
    assert (facts.arch, platform_named("cuda").automatic_order(facts)) == ("sm89", ("flash2", "sdpa"))


@pytest.mark.parametrize("number", [2, 99, 10**30])
def test_dx_082_more_than_can_be_seen_is_refused_with_both_numbers(number):
    with pytest.raises(RequestError) as caught:
        probe_machine(f"cuda:{number}", torch=cuda_torch((9, 0), (9, 0)))
    assert f"asks for device number {number}, but 2 can be seen: cuda:0, cuda:1" in caught.value.message


@pytest.mark.parametrize(
    "value", ["", "-1", "0", "1,0", " 0 , 1 ", "GPU-1234abcd", "MIG-3f-1/2", "0,0", "99", "all", "é"]
)
@pytest.mark.parametrize(
    "variables",
    [("CUDA_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES",), ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")],
    ids="+".join,
)
def test_dx_082_visibility_is_the_drivers_business(monkeypatch, variables, value):
    for variable in variables:
        monkeypatch.setenv(variable, value)
    for torch in (cuda_torch((9, 0), (8, 0)), rocm_torch("gfx942", "gfx90a")):
        facts = probe_machine(torch=torch)
        assert len(facts.devices) == 2
        assert facts.notes == ()
        assert facts.env == {}


@pytest.mark.parametrize(
    ("torch", "asked", "expected"),
    [
        (cuda_torch((9, 0), (9, 0)), None, "cuda"),
        (cuda_torch((9, 0), (9, 0)), "cuda:1", "cuda:1"),
        (rocm_torch("gfx942", "gfx942"), "rocm", "cuda"),
        (rocm_torch("gfx942", "gfx942"), "rocm:1", "cuda:1"),
        (mps_torch(), None, "mps"),
        (fake_torch(), "cpu:0", "cpu:0"),
    ],
)
def test_torchs_name_for_the_device(torch, asked, expected):
    assert torch_device(probe_machine(asked, torch=torch), asked) == expected


# Torch itself and plug-ins


def in_a_process(tmp_path, **files):
    """Probe in a fresh interpreter that finds these modules first; what it prints."""
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    code = (
        "from safelight.platforms import probe_machine\nfrom safelight.errors import SafelightError\n"
        "try:\n    print('\\n'.join([(f := probe_machine()).platform, *f.notes]))\n"
        "except SafelightError as error:\n    print(error.exit_status, error)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (
            "raise RuntimeError('Failed to load the backend extension: torch_npu.')",
            "RuntimeError: Failed to load the backend extension: torch_npu.",
        ),
        ("raise OSError('libascend_hal.so: cannot open shared object file')", "OSError: libascend_hal.so"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise SystemExit(1)", "SystemExit: 1"),
    ],
)
def test_dx_080_a_torch_that_cannot_be_imported(tmp_path, code, cause):
    said = in_a_process(tmp_path, torch=code)
    assert said.startswith("1 PyTorch can't be imported: " + cause)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said


def test_dx_080_what_made_a_plugin_fail_is_named_too(tmp_path):
    """Torch says which plug-in failed to load; why is the cause of its error."""
    said = in_a_process(
        tmp_path,
        torch=(
            "try:\n    raise RuntimeError('Two accelerators cannot be used at the same time: npu and cuda\\nmore')\n"
            "except RuntimeError as error:\n"
            "    raise RuntimeError('Failed to load the backend extension: torch_npu. Disable it') from error\n"
        ),
    )
    assert said == (
        "1 PyTorch can't be imported: RuntimeError: Failed to load the backend extension: torch_npu. Disable it, "
        "because of RuntimeError: Two accelerators cannot be used at the same time: npu and cuda. If a vendor's "
        "plug-in is to blame, TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment leaves it out; otherwise install "
        "PyTorch again\n"
    )


def test_an_error_that_is_its_own_cause_ends(tmp_path):
    said = in_a_process(tmp_path, torch="error = OSError('no')\nerror.__cause__ = error\nraise error")
    assert said.startswith("1 PyTorch can't be imported: OSError: no. If")


def plugin(site, name, code):
    (site / f"{name}.py").write_text(code, encoding="utf-8")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[safelight.platforms]\nacme = {name}:PLATFORM\n", encoding="utf-8")


PLUGIN = """
from safelight.platforms import DeviceFacts, MachineFacts, Platform

def probe(torch):
    {probe}

PLATFORM = Platform(name={name!r}, torch_device="acme", automatic_order=lambda machine: ("sdpa",),
                    default_dtype=lambda machine: "float32", probe=probe)
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_platform_from_an_installed_package(site):
    found = 'return MachineFacts(platform="acme", devices=(DeviceFacts(arch="a1", name="Acme"),))'
    plugin(site, "acme_one", PLUGIN.format(name="acme", probe=found))
    assert probe_machine(torch=fake_torch()).arch == "a1"
    assert probe_machine("acme", torch=cuda_torch((9, 0))).platform == "acme"
    assert probe_machine(torch=cuda_torch((9, 0))).platform == "cuda"
    assert platform_named("acme").torch_device == "acme"
    with pytest.raises(RequestError, match="cpu, cuda, mps, musa, npu, rocm, xpu, acme"):
        probe_machine("nope", torch=fake_torch())


def test_dx_080_a_platform_plugin_that_breaks_is_a_note(site):
    plugin(site, "acme_two", "raise OSError('libacme.so: cannot open shared object file')")
    facts = probe_machine(torch=cuda_torch((9, 0)))
    assert facts.platform == "cuda"
    (note,) = facts.notes
    origin, cause = note.split(" doesn't load: ")
    assert origin == "the platform plug-in acme = acme_two:PLATFORM of acme_two 1.0"
    assert cause == "OSError: libacme.so: cannot open shared object file"
    with pytest.raises(RequestError, match=r"libacme\.so"):
        probe_machine("acme", torch=cuda_torch((9, 0)))


def test_dx_080_a_platform_plugin_whose_probe_raises_is_a_note(site):
    plugin(site, "acme_three", PLUGIN.format(name="acme", probe="raise RuntimeError('no driver')"))
    facts = probe_machine(torch=fake_torch())
    assert facts.platform == "cpu"
    assert "the probe of acme failed: RuntimeError: no driver" in facts.notes[0]


def test_a_plugin_cannot_take_a_built_in_name(site):
    plugin(site, "acme_four", PLUGIN.format(name="cuda", probe="return None"))
    facts = probe_machine(torch=cuda_torch((9, 0)))
    assert facts.platform == "cuda"
    (note,) = facts.notes
    assert note.endswith("doesn't load: it claims the name 'cuda', which is that of safelight.platforms.cuda")
    assert platform_named("cuda").probe(cuda_torch((9, 0))) == facts.replace(notes=())


def test_this_machine_survives_json():
    pytest.importorskip("torch", reason="torch isn't installed here")
    facts = probe_machine()
    assert facts.devices
    assert facts.torch_version
    assert MachineFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
