"""Platforms that a vendor's plug-in or build of torch adds: npu, xpu and musa, with their facts and failures."""

import sys
from types import SimpleNamespace

import pytest

from safelight.errors import RequestError
from safelight.platforms import DeviceFacts, MachineFacts, platform_named, probe_machine, torch_device
from safelight.platforms.spec import UNKNOWN_DEVICE
from tests.unit.fake_torch import (
    GIB,
    VendorError,
    cuda_torch,
    every_cuda_failure,
    every_failure,
    fake_torch,
    musa_torch,
    npu_torch,
    raiser,
    rocm_torch,
    xpu_torch,
)
from tests.unit.site_packages import install

TORCHES = {"npu": npu_torch, "xpu": xpu_torch, "musa": musa_torch}
DEVICES = {"npu": "Ascend910B3", "xpu": "20.1.0", "musa": (3, 1)}
PLUGINS = {"npu": "torch_npu", "musa": "torch_musa"}


def built(name, count=1, **parts):
    return TORCHES[name](*[DEVICES[name]] * count, **parts)


every_vendor = pytest.mark.parametrize("name", TORCHES)
every_plugin = pytest.mark.parametrize("name", PLUGINS)


# Facts


def test_npu_facts():
    assert probe_machine(torch=npu_torch("Ascend910B3", "Ascend910_9392")) == MachineFacts(
        platform="npu",
        devices=(
            DeviceFacts(arch="ascend910b", name="Ascend910B3", memory_bytes=64 * GIB),
            DeviceFacts(arch="ascend910c", name="Ascend910_9392", memory_bytes=64 * GIB),
        ),
        torch_version="2.9.0+cpu",
    )


def test_xpu_facts():
    assert probe_machine(torch=xpu_torch("20.1.0", "12.60.7")) == MachineFacts(
        platform="xpu",
        devices=(
            DeviceFacts(arch="xpu-bmg-g21", name="Intel 0", memory_bytes=12 * GIB),
            DeviceFacts(arch="xpu-pvc", name="Intel 1", memory_bytes=12 * GIB),
        ),
        torch_version="2.13.0+xpu",
        driver_version="1.6.35096+9",
    )


def test_musa_facts():
    assert probe_machine(torch=musa_torch((3, 1), (2, 2))) == MachineFacts(
        platform="musa",
        devices=(
            DeviceFacts(arch="musa-mp31", name="MTT S5000", memory_bytes=80 * GIB),
            DeviceFacts(arch="musa-mp22", name="MTT S5000", memory_bytes=80 * GIB),
        ),
        torch_version="2.11.0+musa5.2.0",
    )


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Ascend910B1", "ascend910b"),
        ("Ascend910B2C", "ascend910b"),
        ("Ascend910B4-1", "ascend910b"),
        ("Ascend910_9391", "ascend910c"),
        ("Ascend910_9362", "ascend910c"),
        ("Ascend910_9599", "ascend950"),
        ("Ascend950PR_9589", "ascend950"),
        ("Ascend950", "ascend950"),
        ("Ascend310P3", "ascend310p"),
        ("Ascend910ProA", "ascend910proa"),
        ("Ascend1020", "ascend1020"),
        ("", ""),
    ],
)
def test_the_family_of_an_ascend(name, arch):
    assert probe_machine(torch=npu_torch(name)).arch == arch


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        ("12.55.8", "xpu-acm-g10"),
        ("12.60.7", "xpu-pvc"),
        ("12.71.4", "xpu-mtl-h"),
        ("20.1.4", "xpu-bmg-g21"),
        ("20.2.0", "xpu-bmg-g31"),
        ("20.4.4", "xpu-lnl-m"),
        ("30.0.4", "xpu-ptl-h"),
        ("35.11.0", "xpu-35.11"),
        ("1.3.29735", "xpu"),
        ("", "xpu"),
        ("OpenCL 3.0 NEO", "xpu"),
        (None, "xpu"),
    ],
)
def test_the_family_of_an_intel_gpu(version, arch):
    facts = probe_machine(torch=xpu_torch(version))
    assert (facts.platform, facts.arch, facts.notes) == ("xpu", arch, ())


def test_the_names_that_torch_has_for_their_devices():
    for name in TORCHES:
        facts = probe_machine(f"{name}:1", torch=built(name, 2))
        assert (facts.platform, torch_device(facts, f"{name}:1")) == (name, f"{name}:1")


def test_an_intel_driver_that_tells_no_version():
    def properties(index=None):
        return SimpleNamespace(name="Intel", total_memory=GIB, version="20.1.0")

    facts = probe_machine(torch=xpu_torch("20.1.0", get_device_properties=properties))
    assert (facts.arch, facts.driver_version, facts.notes) == ("xpu-bmg-g21", None, ())


# Not there


def test_dx_079_a_stock_torch_is_no_vendor_s():
    stock = fake_torch(xpu=SimpleNamespace(_is_compiled=lambda: False, is_available=lambda: False))
    stock.version.xpu = None
    for torch in (fake_torch(), stock, SimpleNamespace()):
        assert [platform_named(name).probe(torch) for name in TORCHES] == [None, None, None]
    assert probe_machine(torch=stock).notes == ()


@every_vendor
def test_dx_079_a_build_without_a_device_says_so(name):
    torch = TORCHES[name]()
    facts = probe_machine(torch=torch)
    assert facts.platform == "cpu"
    assert facts.notes == (
        f"no {name} device can be used, so the CPU was chosen: torch is built for it but sees no device",
    )
    with pytest.raises(RequestError, match=f"device '{name}' can't be used: torch is built for it but sees no device"):
        probe_machine(name, torch=torch)


@every_vendor
def test_dx_079_none_of_the_others_is_taken_instead(name):
    for other in TORCHES:
        if other == name:
            assert probe_machine(name, torch=built(name)).platform == name
        else:
            with pytest.raises(RequestError, match=rf"isn't built for it.*Found here: .*{name} \(1 x "):
                probe_machine(other, torch=built(name))


# Failures


@every_cuda_failure
@pytest.mark.parametrize("function", ["is_available", "device_count", "get_device_properties"])
@every_vendor
def test_dx_080_a_broken_driver_leaves_the_cpu_and_the_cause(name, function, error):
    torch = built(name, 2, **{function: raiser(error)})
    facts = probe_machine(torch=torch)
    assert facts.platform == "cpu"
    first_line = (str(error).splitlines() or [""])[0]
    assert facts.notes[0].startswith(f"no {name} device can be used, so the CPU was chosen: torch.{name}.{function}(")
    assert type(error).__name__ in facts.notes[0] and first_line in facts.notes[0]
    assert "\n" not in "".join(facts.notes)
    with pytest.raises(RequestError) as caught:
        probe_machine(name, torch=torch)
    assert first_line in caught.value.message


@every_cuda_failure
@pytest.mark.parametrize(("name", "function"), [("npu", "get_device_name"), ("musa", "get_device_capability")])
def test_dx_080_a_device_without_its_architecture_is_no_device(name, function, error):
    facts = probe_machine(torch=built(name, **{function: raiser(error)}))
    assert facts.platform == "cpu"
    assert type(error).__name__ in facts.notes[0]


@pytest.mark.parametrize(
    "part", ["is_available", "device_count", "get_device_properties", "get_device_name", "get_device_capability"]
)
@pytest.mark.parametrize("value", ["missing", None], ids=str)
@every_vendor
def test_dx_079_a_missing_function_is_no_crash(name, value, part):
    torch = built(name)
    if value is None:
        setattr(getattr(torch, name), part, None)
    elif hasattr(getattr(torch, name), part):
        delattr(getattr(torch, name), part)
    facts = probe_machine(torch=torch)
    assert facts.platform in ("cpu", name)
    assert facts.platform == name or part in facts.notes[0] or "'NoneType' object is not callable" in facts.notes[0]


@pytest.mark.parametrize("part", ["__version__", "version", "backends", "cuda"])
@pytest.mark.parametrize("value", ["missing", None], ids=str)
@every_vendor
def test_dx_079_a_torch_that_lacks_a_part_still_has_its_devices(name, value, part):
    torch = built(name)
    if value is None:
        setattr(torch, part, None)
    else:
        delattr(torch, part)
    facts = probe_machine(torch=torch)
    assert (facts.platform, len(facts.devices)) == (name, 1)
    assert (facts.torch_version is None) == (part == "__version__")


@every_failure
@every_plugin
def test_dx_080_a_namespace_that_raises_is_facts_with_the_cause(name, error):
    class Torch:
        version = SimpleNamespace(cuda=None, hip=None)

    setattr(Torch, name, property(raiser(error)))
    facts = platform_named(name).probe(Torch())
    if isinstance(error, AttributeError):
        assert facts is None  # to Python that is a missing attribute
        return
    (note,) = facts.notes
    assert note.startswith(f"torch.{name} can't be read: {type(error).__name__}")
    assert (facts.platform, facts.devices) == (name, ())


@every_failure
def test_an_xpu_build_that_cannot_be_asked_is_facts_with_the_cause(error):
    torch = xpu_torch("20.1.0", _is_compiled=raiser(error), is_available=lambda: False)
    torch.version.xpu = None
    facts = platform_named("xpu").probe(torch)
    assert facts.devices == ()
    assert facts.notes[0].startswith(f"torch.xpu._is_compiled() failed: {type(error).__name__}")


@every_vendor
def test_one_broken_device_among_good_ones_keeps_its_place(name):
    good = built(name, 2)
    properties = getattr(good, name).get_device_properties

    def one_fails(index=0):
        if index == 0:
            raise VendorError("device 0 has fallen off the bus")
        return properties(index)

    getattr(good, name).get_device_properties = one_fails
    facts = probe_machine(torch=good)
    assert facts.devices[0] == UNKNOWN_DEVICE
    assert facts.devices[1].memory_bytes
    assert "fallen off the bus" in facts.notes[0]


# Two vendors side by side


@every_failure
@every_vendor
def test_a_broken_plugin_beside_another_vendor_s_device_takes_nothing_from_it(name, error):
    for torch, here in ((cuda_torch((9, 0)), "cuda"), (rocm_torch("gfx942"), "rocm")):
        setattr(torch, name, getattr(built(name, is_available=raiser(error)), name))
        facts = probe_machine(torch=torch)
        assert (facts.platform, facts.notes) == (here, ())
        with pytest.raises(RequestError, match=type(error).__name__) as caught:
            probe_machine(name, torch=torch)
        assert f", {here} (1 x " in caught.value.message


def test_two_accelerators_at_once_give_facts_with_the_cause():
    error = RuntimeError("Two accelerators cannot be used at the same time in PyTorch: npu and cuda\nUninstall one")
    torch = cuda_torch()
    torch.npu = npu_torch("Ascend910B3", is_available=raiser(error)).npu
    facts = platform_named("npu").probe(torch)
    assert facts.devices == ()
    assert facts.notes == (f"torch.npu.is_available() failed: RuntimeError: {str(error).splitlines()[0]}",)
    assert probe_machine(torch=torch).platform == "cpu"


def test_a_cuda_build_without_a_driver_leaves_the_npu_that_works():
    torch = cuda_torch((9, 0), is_available=raiser(RuntimeError("Found no NVIDIA driver")))
    torch.npu = npu_torch("Ascend910B3").npu
    assert probe_machine(torch=torch).platform == "npu"


def test_a_plugin_that_poses_as_cuda_is_not_taken_for_it():
    """torch_npu and torchada can put their own functions into torch.cuda."""
    torch = npu_torch("Ascend910B3")
    torch.cuda = torch.npu
    assert probe_machine(torch=torch).platform == "npu"
    with pytest.raises(RequestError, match="names neither a CUDA nor a HIP version"):
        probe_machine("cuda", torch=torch)


# Plug-ins that torch hasn't loaded


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("torch_musa", None)


AUTOLOAD = "[torch.backends]\n{0} = {0}:_autoload\n"


@every_plugin
def test_dx_080_an_installed_plugin_that_torch_left_out_is_named(site, name):
    dist = PLUGINS[name]
    install(
        site,
        dist,
        "2.9.0",
        files={f"{dist}.py": "raise OSError('libascend_hal.so')"},
        entry_points=AUTOLOAD.format(dist),
    )
    facts = probe_machine(torch=fake_torch())
    assert facts.platform == "cpu"
    cause = f"{dist} 2.9.0 is installed, but torch hasn't loaded it: TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment"
    assert facts.notes == (f"no {name} device can be used, so the CPU was chosen: {cause} leaves it out",)
    assert dist not in sys.modules
    with pytest.raises(RequestError, match=f"device '{name}' can't be used: {dist} 2.9.0 is installed"):
        probe_machine(name, torch=fake_torch())


TORCH_MUSA = """
try:
    import torch_of_this_test
except ImportError:
    pass  # the trial, in a process of its own
else:
    torch_of_this_test.musa = torch_of_this_test.found
"""


def test_an_older_torch_musa_is_imported(site, monkeypatch):
    """Before its entry point came, nothing but an import made its devices."""
    torch = fake_torch()
    monkeypatch.setitem(sys.modules, "torch_of_this_test", torch)
    torch.found = musa_torch((3, 1)).musa
    install(site, "torch_musa", "2.5.0", files={"torch_musa.py": TORCH_MUSA})
    facts = probe_machine(torch=torch)
    assert (facts.platform, facts.arch) == ("musa", "musa-mp31")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise ImportError('libmusart.so.4: cannot open shared object file\\nmore')", "ImportError: libmusart.so.4"),
        ("raise OSError('libmusa.so')", "OSError: libmusa.so"),
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("raise AttributeError('_C')", "AttributeError: _C"),
        ("raise AssertionError('not compiled')", "AssertionError: not compiled"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    ],
)
def test_dx_080_an_older_torch_musa_that_is_broken_is_a_note(site, code, cause):
    install(site, "torch_musa", "2.5.0", files={"torch_musa.py": code})
    facts = probe_machine(torch=fake_torch())
    assert facts.platform == "cpu"
    (note,) = facts.notes
    assert note.startswith(f"no musa device can be used, so the CPU was chosen: importing torch_musa failed: {cause}")


def test_dx_080_an_older_torch_musa_that_ends_its_process_ends_a_trial_alone(site):
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    install(site, "torch_musa", "2.5.0", files={"torch_musa.py": code})
    facts = probe_machine(torch=fake_torch())
    assert facts.platform == "cpu"
    assert "importing torch_musa failed: importing it died with SIGSEGV" in facts.notes[0]


def test_an_older_torch_musa_that_adds_nothing_is_not_there(site):
    install(site, "torch_musa", "2.5.0", files={"torch_musa.py": ""})
    assert platform_named("musa").probe(fake_torch()) is None


@every_plugin
def test_what_an_interrupted_installation_leaves_is_no_plugin(site, name):
    (site / f"{PLUGINS[name]}-2.9.0.dist-info").mkdir()
    assert probe_machine(torch=fake_torch()).platform == "cpu"
