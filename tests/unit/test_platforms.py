"""Platforms: what each declares, the facts that its probe finds in a faked torch, and every way in which that fails."""

import os
import platform as host
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from safelight.errors import RequestError
from safelight.platforms import DeviceFacts, MachineFacts, PackageFacts, platform_named, platforms, probe_machine
from safelight.platforms.spec import UNKNOWN_DEVICE
from tests.unit.fake_torch import (
    GIB,
    cuda_torch,
    every_cuda_failure,
    every_failure,
    fake_cuda,
    fake_torch,
    mps_torch,
    raiser,
    rocm_torch,
)

ALL_NAMES = ("cpu", "cuda", "mps", "musa", "npu", "rocm", "xpu")


def machine(platform, arch, **fields):
    return MachineFacts(platform=platform, devices=(DeviceFacts(arch=arch, name="a device"),), **fields)


def order(facts):
    return platform_named(facts.platform).automatic_order(facts)


def dtype(facts):
    return platform_named(facts.platform).default_dtype(facts)


# Declarations


def test_platforms_that_there_are():
    assert [platform.name for platform in platforms()] == ["cpu", "cuda", "mps", "musa", "npu", "rocm", "xpu"]


def test_a_declaration_holds_its_own_name_and_torch_device():
    assert {platform.name: platform.torch_device for platform in platforms()} == {
        "cpu": "cpu",
        "cuda": "cuda",
        "mps": "mps",
        "musa": "musa",
        "npu": "npu",
        "rocm": "cuda",
        "xpu": "xpu",
    }


@pytest.mark.parametrize("name", ["CUDA", "gpu", "", "spec", "vulkan"])
def test_an_unknown_platform_is_refused_with_the_list(name):
    with pytest.raises(RequestError, match=r"isn't known.*cpu, cuda, mps, musa, npu, rocm, xpu"):
        platform_named(name)


def test_importing_platforms_imports_no_torch_and_no_vendor():
    code = (
        "import safelight.platforms as p, sys; p.platforms(); [p.load_machine(n) for n in p.machine_names()];"
        "print([m for m in ('torch', 'diffusers', 'transformers', 'numpy', 'amdsmi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Orders and dtypes

ORDERS = [
    ("cuda", "sm90", ("flash3", "flash2", "sdpa")),
    ("cuda", "sm100", ("flash4", "cudnn", "sdpa")),
    ("cuda", "sm103", ("flash4", "cudnn", "sdpa")),
    ("cuda", "sm80", ("flash2", "sdpa")),
    ("cuda", "sm86", ("flash2", "sdpa")),
    ("cuda", "sm89", ("flash2", "sdpa")),
    ("cuda", "sm120", ("flash2", "sdpa")),
    ("cuda", "sm121", ("flash2", "sdpa")),
    ("cuda", "sm75", ("sdpa",)),
    ("cuda", "sm87", ("sdpa",)),
    ("cuda", "sm110", ("sdpa",)),
    ("cuda", "unknown", ("sdpa",)),
    ("rocm", "gfx942", ("aiter", "flash2", "sdpa")),
    ("rocm", "gfx950", ("aiter", "flash2", "sdpa")),
    ("rocm", "gfx90a", ("flash2", "sdpa")),
    ("rocm", "gfx908", ("sdpa",)),
    ("rocm", "gfx1100", ("sdpa",)),
    ("rocm", "gfx1201", ("sdpa",)),
    ("rocm", "gfx1250", ("sdpa",)),
    ("rocm", "sm90", ("sdpa",)),
    ("npu", "ascend910b", ("ascend", "sdpa")),
    ("npu", "ascend950", ("ascend", "sdpa")),
    ("xpu", "xpu-bmg-g21", ("xpu_flash", "sdpa")),
    ("xpu", "xpu-pvc", ("xpu_flash", "sdpa")),
    ("musa", "musa-mp31", ("mate", "sdpa")),
    ("mps", "mps", ("sdpa",)),
    ("cpu", "cpu-avx2", ("sdpa",)),
    ("cpu", "cpu-amx", ("sdpa",)),
]


@pytest.mark.parametrize(("name", "arch", "expected"), ORDERS)
def test_automatic_order(name, arch, expected):
    assert order(machine(name, arch)) == expected


@pytest.mark.parametrize("arch", ["gfx1030", "gfx1100", "gfx1151", "gfx1201"])
@pytest.mark.parametrize(
    ("variant", "expected"), [("triton", ("flash2", "sdpa")), ("ck", ("sdpa",)), (None, ("sdpa",))]
)
def test_radeon_takes_flash2_in_its_triton_variant_only(arch, variant, expected):
    package = PackageFacts(dist="flash-attn", version="2.8.3", variant=variant)
    assert order(machine("rocm", arch, packages={"flash_attn_2": package})) == expected


def test_the_triton_variant_opens_nothing_beyond_radeon():
    package = PackageFacts(dist="flash-attn", version="2.8.3", variant="triton")
    assert order(machine("rocm", "gfx1250", packages={"flash_attn_2": package})) == ("sdpa",)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_machine_without_devices_has_an_order_and_a_dtype(name):
    facts = MachineFacts(platform=name)
    assert order(facts)[-1] == "sdpa"
    assert dtype(facts) in ("float32", "bfloat16", "float16")


DTYPES = [
    ("cuda", "sm75", "float16"),
    ("cuda", "sm80", "bfloat16"),
    ("cuda", "sm90", "bfloat16"),
    ("cuda", "sm120", "bfloat16"),
    ("cuda", "unknown", "float16"),
    ("rocm", "gfx906", "float16"),
    ("rocm", "gfx908", "bfloat16"),
    ("rocm", "gfx90a", "bfloat16"),
    ("rocm", "gfx942", "bfloat16"),
    ("rocm", "gfx950", "bfloat16"),
    ("rocm", "gfx1030", "float16"),
    ("rocm", "gfx1100", "bfloat16"),
    ("rocm", "gfx1201", "bfloat16"),
    ("npu", "ascend910b", "bfloat16"),
    ("npu", "ascend910c", "bfloat16"),
    ("npu", "ascend950", "bfloat16"),
    ("npu", "ascend310p", "float16"),
    ("npu", "ascend910proa", "float16"),
    ("xpu", "xpu-bmg-g21", "bfloat16"),
    ("xpu", "xpu-pvc", "bfloat16"),
    ("xpu", "xpu-mtl-h", "float16"),
    ("musa", "musa-mp31", "bfloat16"),
    ("musa", "musa-mp22", "bfloat16"),
    ("musa", "musa-mp21", "float16"),
    ("musa", "unknown", "float16"),
    ("cpu", "cpu-avx2", "float32"),
    ("cpu", "cpu-amx", "float32"),
    ("cpu", "cpu-neon", "float32"),
]


@pytest.mark.parametrize(("name", "arch", "expected"), DTYPES)
def test_default_dtype(name, arch, expected):
    assert dtype(machine(name, arch)) == expected


@pytest.mark.parametrize(
    ("chip", "macos", "expected"),
    [
        ("Apple M1", "15.1", "float16"),
        ("Apple M1 Ultra", "15.1", "float16"),
        ("Apple M2", "15.1", "bfloat16"),
        ("Apple M4 Max", "26.0", "bfloat16"),
        ("Apple M10", "26.0", "bfloat16"),
        ("Apple M2", "13.6.1", "float16"),
        ("Apple M2", None, "bfloat16"),
        ("Apple GPU", "14.0", "bfloat16"),
    ],
)
def test_default_dtype_on_apple(chip, macos, expected):
    device = DeviceFacts(arch="mps", name=chip)
    assert dtype(MachineFacts(platform="mps", devices=(device,), driver_version=macos)) == expected


# Probing each platform


def test_cuda_facts():
    torch = cuda_torch((9, 0), (12, 0))
    torch._C = SimpleNamespace(_cuda_getDriverVersion=lambda: 12080)
    assert probe_machine(torch=torch) == MachineFacts(
        platform="cuda",
        devices=(
            DeviceFacts(arch="sm90", name="NVIDIA 0", memory_bytes=GIB),
            DeviceFacts(arch="sm120", name="NVIDIA 1", memory_bytes=2 * GIB),
        ),
        torch_version="2.13.0",
        cuda_version="13.0",
        driver_version="12.8",
    )


def test_rocm_facts():
    assert probe_machine(torch=rocm_torch("gfx942:sramecc+:xnack-", "gfx1100")) == MachineFacts(
        platform="rocm",
        devices=(
            DeviceFacts(arch="gfx942", name="AMD 0", memory_bytes=192 * GIB),
            DeviceFacts(arch="gfx1100", name="AMD 1", memory_bytes=192 * GIB),
        ),
        torch_version="2.13.0",
        hip_version="7.1.25424",
    )


def test_mps_facts(monkeypatch):
    monkeypatch.setattr(host, "mac_ver", lambda: ("15.6", ("", "", ""), "arm64"))
    assert probe_machine(torch=mps_torch()) == MachineFacts(
        platform="mps",
        devices=(DeviceFacts(arch="mps", name="Apple M4 Max", memory_bytes=48 * GIB),),
        torch_version="2.13.0",
        driver_version="15.6",
    )


def test_mps_of_a_torch_that_cannot_name_its_chip():
    torch = mps_torch(get_name=raiser(RuntimeError("no name")))
    del torch.mps
    facts = probe_machine(torch=torch)
    assert facts.devices == (DeviceFacts(arch="mps", name="Apple GPU", memory_bytes=None),)
    assert facts.notes == ("torch.backends.mps.get_name() failed: RuntimeError: no name",)


@pytest.mark.parametrize(
    ("capability", "amx", "processor", "arch"),
    [
        ("AVX512", True, "x86_64", "cpu-amx"),
        ("AVX512", False, "x86_64", "cpu-avx512"),
        ("AVX512", None, "x86_64", "cpu-avx512"),
        ("AVX2", True, "x86_64", "cpu-avx2"),
        ("DEFAULT", False, "arm64", "cpu-neon"),
        ("SVE256", False, "aarch64", "cpu-neon"),
        ("NO AVX", False, "x86_64", "cpu"),
        ("VSX", False, "ppc64le", "cpu"),
        (None, None, "x86_64", "cpu"),
    ],
)
def test_cpu_architecture(monkeypatch, capability, amx, processor, arch):
    monkeypatch.setattr(host, "machine", lambda: processor)
    torch = fake_torch()
    if capability is None:
        del torch.backends.cpu
    else:
        torch.backends.cpu.get_cpu_capability = lambda: capability
    if amx is not None:
        torch.cpu = SimpleNamespace(_is_amx_tile_supported=lambda: amx)
    facts = probe_machine(torch=torch)
    assert (facts.platform, facts.arch, len(facts.devices), facts.notes) == ("cpu", arch, 1, ())
    assert facts.devices[0].name


@every_failure
def test_cpu_is_there_whatever_torch_says(error):
    torch = fake_torch(cpu=SimpleNamespace(_is_amx_tile_supported=raiser(RuntimeError("no"))))
    torch.backends.cpu.get_cpu_capability = raiser(error)
    facts = probe_machine("cpu", torch=torch)
    assert facts.arch in ("cpu", "cpu-neon")
    (note,) = facts.notes
    assert note.startswith("torch.backends.cpu.get_cpu_capability() failed: ")


@pytest.mark.parametrize("answer", [-1, 0, AttributeError("no sysconf"), ValueError("unknown name"), OSError("no")])
def test_cpu_memory_is_none_where_it_is_not_known(monkeypatch, answer):
    monkeypatch.setattr(os, "sysconf", raiser(answer) if isinstance(answer, Exception) else lambda _name: answer)
    assert probe_machine(torch=fake_torch()).devices[0].memory_bytes is None


def test_cpu_memory(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert probe_machine(torch=fake_torch()).devices[0].memory_bytes == 4_096_000


# Vendor first, capability second


def test_dx_034_a_hip_build_is_rocm_whatever_torch_cuda_says():
    torch = rocm_torch("gfx942:sramecc+:xnack-", cuda="12.8")
    facts = probe_machine(torch=torch)
    assert (facts.platform, facts.arch, facts.cuda_version, facts.hip_version) == ("rocm", "gfx942", None, "7.1.25424")
    assert platform_named("cuda").probe(torch) is None
    assert platform_named("rocm").probe(cuda_torch((9, 0))) is None


@pytest.mark.parametrize("error", ["ImportError('amdsmi')", "OSError('libamd_smi.so')", "KeyError('ROCM_PATH')", None])
def test_dx_034_a_vendors_tool_has_no_say(tmp_path, monkeypatch, error):
    (tmp_path / "amdsmi.py").write_text(
        f"raise {error}" if error else "def amdsmi_get_processor_handles():\n    return []\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probe_machine(torch=rocm_torch("gfx942")).platform == "rocm"
    assert "amdsmi" not in sys.modules


@pytest.mark.parametrize(("torch", "name"), [(cuda_torch(), "cuda"), (rocm_torch(), "rocm")], ids=["cuda", "rocm"])
def test_dx_034_an_accelerator_build_without_a_device_says_so(torch, name):
    facts = probe_machine(torch=torch)
    assert facts.platform == "cpu"
    assert facts.notes == (
        f"no {name} device can be used, so the CPU was chosen: torch is built for it but sees no device",
    )
    with pytest.raises(RequestError) as caught:
        probe_machine(name, torch=torch)
    assert f"device '{name}' can't be used: torch is built for it but sees no device" in caught.value.message
    assert "Found here: cpu (1 x " in caught.value.message
    assert caught.value.details["found"] == ["cpu"]


def test_a_cpu_build_chooses_the_cpu_without_a_word():
    assert probe_machine(torch=fake_torch()).notes == ()


def test_asking_for_the_cpu_needs_no_excuse():
    assert probe_machine("cpu", torch=cuda_torch()).notes == ()
    assert probe_machine("cpu", torch=cuda_torch((9, 0))).platform == "cpu"


def test_a_device_of_neither_vendor_is_not_taken_for_cuda():
    facts = probe_machine(torch=fake_torch(cuda=fake_cuda((9, 0))))
    assert facts.platform == "cpu"
    assert "names neither a CUDA nor a HIP version" in facts.notes[0]


# Failures


@every_cuda_failure
@pytest.mark.parametrize("function", ["is_available", "device_count", "get_device_properties", "get_device_capability"])
def test_a_broken_driver_leaves_the_cpu_and_the_cause(error, function):
    torch = cuda_torch((9, 0), (9, 0), **{function: raiser(error)})
    facts = probe_machine(torch=torch)
    assert facts.platform == "cpu"
    first_line = (str(error).splitlines() or [""])[0]
    assert type(error).__name__ in facts.notes[0]
    assert first_line in facts.notes[0]
    assert "\n" not in "".join(facts.notes)
    with pytest.raises(RequestError) as caught:
        probe_machine("cuda", torch=torch)
    assert first_line in caught.value.message


@every_cuda_failure
@pytest.mark.parametrize("function", ["is_available", "device_count", "get_device_properties"])
def test_a_broken_rocm_driver_too(error, function):
    facts = probe_machine(torch=rocm_torch("gfx942", **{function: raiser(error)}))
    assert facts.platform == "cpu"
    assert facts.notes[0].startswith("no rocm device can be used")


@every_failure
def test_a_broken_driver_version_costs_only_itself(error):
    torch = cuda_torch((9, 0))
    torch._C = SimpleNamespace(_cuda_getDriverVersion=raiser(error))
    facts = probe_machine(torch=torch)
    assert (facts.platform, facts.arch, facts.driver_version) == ("cuda", "sm90", None)


@pytest.mark.parametrize("function", ["is_built", "is_available"])
@every_failure
def test_a_broken_metal_leaves_the_cpu(error, function):
    assert probe_machine(torch=mps_torch(**{function: raiser(error)})).platform == "cpu"


def test_a_hip_device_without_its_architecture_is_no_device():
    torch = rocm_torch("gfx942", get_device_properties=lambda _: SimpleNamespace(name="AMD", total_memory=GIB))
    facts = probe_machine(torch=torch)
    assert facts.platform == "cpu"
    assert "gcnArchName" in facts.notes[0]


def test_one_broken_device_among_good_ones_keeps_its_place():
    def capability(index):
        if index == 0:
            raise RuntimeError("CUDA error: uncorrectable ECC error")
        return (8, 9)

    torch = cuda_torch((9, 0), (8, 9), get_device_capability=capability)
    facts = probe_machine(torch=torch)
    assert facts.devices[0] == UNKNOWN_DEVICE
    assert facts.devices[1].arch == "sm89"
    assert "uncorrectable ECC error" in facts.notes[0]
    assert probe_machine("cuda:1", torch=torch).arch == "sm89"
    with pytest.raises(RequestError, match="uncorrectable ECC error"):
        probe_machine("cuda:0", torch=torch)


def test_a_warning_of_an_old_driver_is_the_cause():
    def is_available():
        warnings.warn("CUDA initialization: The NVIDIA driver is too old\nUpdate it", UserWarning, stacklevel=1)
        return False

    facts = probe_machine(torch=cuda_torch((9, 0), is_available=is_available))
    assert facts.platform == "cpu"
    assert facts.notes[0].endswith("is_available() warned: CUDA initialization: The NVIDIA driver is too old")


def test_cancelling_a_probe_cancels_it():
    with pytest.raises(KeyboardInterrupt):
        probe_machine(torch=cuda_torch((9, 0), is_available=raiser(KeyboardInterrupt())))


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize(
    "missing",
    ["__version__", "version", "backends", "cuda", "version.cuda", "version.hip", "backends.mps", "everything"],
)
def test_dx_079_a_missing_attribute_means_not_there(name, missing):
    torch = SimpleNamespace() if missing == "everything" else cuda_torch((9, 0))
    if missing != "everything":
        path, _, last = missing.rpartition(".")
        delattr(getattr(torch, path) if path else torch, last)
    facts = platform_named(name).probe(torch)
    assert facts is None or facts.platform == name
    assert probe_machine(torch=torch).platform in ("cuda", "cpu")


@pytest.mark.parametrize("name", ALL_NAMES)
@every_failure
def test_dx_079_an_attribute_that_raises_means_not_there(name, error):

    class Torch:
        version = property(raiser(error))
        backends = property(raiser(error))
        cuda = property(raiser(error))

    facts = platform_named(name).probe(Torch())
    assert facts is None or (facts.platform, name) == ("cpu", "cpu")
    assert probe_machine(torch=Torch()).platform == "cpu"
