"""Torch modules of machines that nobody here owns, and the failures that they are known for."""

from types import SimpleNamespace

import pytest

GIB = 2**30


class VendorError(Exception):
    """A vendor's own error class, which descends from nothing but Exception."""


def raiser(error):
    def function(*_args):
        raise error

    return function


def fake_torch(**parts):
    """A torch of the CPU build; `parts` replace or add attributes."""
    usual = {
        "__version__": "2.13.0",
        "version": SimpleNamespace(cuda=None, hip=None),
        "backends": SimpleNamespace(
            cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX2"),
            mps=SimpleNamespace(is_built=lambda: False, is_available=lambda: False),
        ),
        "cuda": SimpleNamespace(is_available=lambda: False, device_count=lambda: 0),
    }
    return SimpleNamespace(**{**usual, **parts})


def fake_cuda(*capabilities, **parts):
    """torch.cuda with one device for each capability."""

    def properties(index):
        return SimpleNamespace(name=f"NVIDIA {index}", total_memory=(index + 1) * GIB)

    usual = {
        "is_available": lambda: bool(capabilities),
        "device_count": lambda: len(capabilities),
        "get_device_capability": lambda index: capabilities[index],
        "get_device_properties": properties,
        "VendorError": VendorError,
    }
    return SimpleNamespace(**{**usual, **parts})


def cuda_torch(*capabilities, **parts):
    return fake_torch(version=SimpleNamespace(cuda="13.0", hip=None), cuda=fake_cuda(*capabilities, **parts))


def fake_rocm(*names, **parts):
    """torch.cuda of a HIP build with one device for each gcnArchName, all claiming capability 9.4."""

    def properties(index):
        return SimpleNamespace(name=f"AMD {index}", total_memory=192 * GIB, gcnArchName=names[index])

    return fake_cuda(*[(9, 4) for _ in names], **{"get_device_properties": properties, **parts})


def rocm_torch(*names, cuda=None, **parts):
    return fake_torch(version=SimpleNamespace(cuda=cuda, hip="7.1.25424"), cuda=fake_rocm(*names, **parts))


def mps_torch(**parts):
    mps = {"is_built": lambda: True, "is_available": lambda: True, "get_name": lambda: "Apple M4 Max"}
    return fake_torch(
        backends=SimpleNamespace(
            cpu=SimpleNamespace(get_cpu_capability=lambda: "DEFAULT"), mps=SimpleNamespace(**{**mps, **parts})
        ),
        mps=SimpleNamespace(recommended_max_memory=lambda: 48 * GIB),
    )


def fake_devices(make, count, parts):
    """A vendor's namespace with `count` devices, whose properties `make` gives by index."""

    def properties(index=0):
        return make(index)

    usual = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "get_device_properties": properties,
        "VendorError": VendorError,
    }
    return SimpleNamespace(**{**usual, **parts})


def npu_torch(*names, **parts):
    """A torch that has loaded torch_npu, with one device for each of CANN's names."""
    npu = fake_devices(
        lambda index: SimpleNamespace(name=names[index], total_memory=64 * GIB),
        len(names),
        {"get_device_name": lambda index: names[index], **parts},
    )
    return fake_torch(__version__="2.9.0+cpu", npu=npu)


def xpu_torch(*versions, **parts):
    """A torch built for Intel's GPUs, with a device for each version; a None is a device that doesn't tell its own."""

    def properties(index):
        told = {} if versions[index] is None else {"version": versions[index]}
        return SimpleNamespace(name=f"Intel {index}", total_memory=12 * GIB, driver_version="1.6.35096+9", **told)

    xpu = fake_devices(properties, len(versions), {"_is_compiled": lambda: True, **parts})
    return fake_torch(__version__="2.13.0+xpu", version=SimpleNamespace(cuda=None, hip=None, xpu="20250302"), xpu=xpu)


def musa_torch(*capabilities, **parts):
    """A torch that has loaded torch_musa, with one device for each capability."""
    musa = fake_devices(
        lambda index: SimpleNamespace(name="MTT S5000", total_memory=80 * GIB),
        len(capabilities),
        {"get_device_capability": lambda index: capabilities[index], **parts},
    )
    return fake_torch(__version__="2.11.0+musa5.2.0", musa=musa)


# Every kind of failure that a foreign package is known for.
FAILURES = (
    ImportError("libcuda.so.1: cannot open shared object file\nmore"),
    OSError("libcuda.so.1: cannot open shared object file"),
    RuntimeError("Found no NVIDIA driver on your system.\nPlease check"),
    AttributeError("module 'torch' has no attribute '_C'"),
    AssertionError("Torch not compiled with CUDA enabled"),
    SystemExit(1),
    KeyError("gfx942"),
    ValueError("invalid literal for int() with base 10: 'GPU-1234abcd'"),
    TypeError("'>=' not supported between instances of 'NoneType' and 'str'"),
    NotImplementedError(),
)
every_failure = pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
# torch.cuda's functions raise an error class of its own on top.
every_cuda_failure = pytest.mark.parametrize(
    "error",
    [*FAILURES, VendorError("CUDA call failed lazily at initialization")],
    ids=lambda error: type(error).__name__,
)
