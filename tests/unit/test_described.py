"""Described machines: the shipped ones with their golden orders, files that people send, and files that are wrong."""

import json

import pytest

from safelight.attention import declared_backends
from safelight.errors import RequestError
from safelight.platforms import DeviceFacts, MachineFacts, PackageFacts, load_machine, machine_names, platform_named
from safelight.platforms.packages import Installed
from tests.unit.fake_torch import GIB

HOPPER = ("flash3", "flash2", "sdpa")
INSTINCT = ("aiter", "flash2", "sdpa")
MACHINES = {
    "a100": ("cuda", "sm80", ("flash2", "sdpa"), "bfloat16"),
    "ascend910b": ("npu", "ascend910b", ("ascend", "sdpa"), "bfloat16"),
    "ascend910b-broken-cann": ("cpu", "cpu-neon", ("sdpa",), "float32"),
    "ascend950": ("npu", "ascend950", ("ascend", "sdpa"), "bfloat16"),
    "b200": ("cuda", "sm100", ("flash4", "cudnn", "sdpa"), "bfloat16"),
    "cpu-amx": ("cpu", "cpu-amx", ("sdpa",), "float32"),
    "cpu-avx2": ("cpu", "cpu-avx2", ("sdpa",), "float32"),
    "h100": ("cuda", "sm90", HOPPER, "bfloat16"),
    "h100-flash4-only": ("cuda", "sm90", HOPPER, "bfloat16"),
    "h100-old-driver": ("cpu", "cpu-amx", ("sdpa",), "float32"),
    "h200": ("cuda", "sm90", HOPPER, "bfloat16"),
    "intel-b580": ("xpu", "xpu-bmg-g21", ("xpu_flash", "sdpa"), "bfloat16"),
    "m4-max": ("mps", "mps", ("sdpa",), "bfloat16"),
    "mi300x-rocm7": ("rocm", "gfx942", INSTINCT, "bfloat16"),
    "mi300x-rocm7-aiter": ("rocm", "gfx942", INSTINCT, "bfloat16"),
    "mi300x-rocm7-cuda-packages": ("rocm", "gfx942", INSTINCT, "bfloat16"),
    "mi300x-rocm7-flash2": ("rocm", "gfx942", INSTINCT, "bfloat16"),
    "mi300x-rocm7-flash2-broken": ("rocm", "gfx942", INSTINCT, "bfloat16"),
    "mtt-s5000": ("musa", "musa-mp31", ("mate", "sdpa"), "bfloat16"),
    "rtx4090": ("cuda", "sm89", ("flash2", "sdpa"), "bfloat16"),
    "rtx5090": ("cuda", "sm120", ("flash2", "sdpa"), "bfloat16"),
    "rtx5090-old-flash2": ("cuda", "sm120", ("flash2", "sdpa"), "bfloat16"),
    "rx7900": ("rocm", "gfx1100", ("flash2", "sdpa"), "bfloat16"),
    "rx9070": ("rocm", "gfx1201", ("flash2", "sdpa"), "bfloat16"),
    "rx9070-aiter": ("rocm", "gfx1201", ("sdpa",), "bfloat16"),
}
PACKAGES = {
    "ascend910b": {"mindiesd", "torch_npu"},
    "ascend950": {"mindiesd", "torch_npu"},
    "b200": {"flash_attn_4"},
    "h100": {"flash_attn_2", "flash_attn_3", "sageattention", "xformers"},
    "h100-flash4-only": {"flash_attn_4"},
    "h100-old-driver": {"flash_attn_2"},
    "h200": {"flash_attn_2", "flash_attn_3"},
    "intel-b580": {"xpu_flash"},
    "mi300x-rocm7-aiter": {"amd_aiter", "flash_attn_2"},
    "mi300x-rocm7-flash2": {"flash_attn_2"},
    "mtt-s5000": {"flash_attn_3", "mate", "sageattention"},
    "rtx4090": {"flash_attn_2", "sageattention"},
    "rtx5090": {"flash_attn_2", "sageattention", "sageattn3"},
    "rtx5090-old-flash2": {"flash_attn_2"},
    "rx7900": {"flash_attn_2"},
    "rx9070": {"flash_attn_2"},
}
BROKEN = {
    "ascend910b-broken-cann": {"torch_npu": "ImportError: libhccl.so"},
    "h100-flash4-only": {"xformers": "ModuleNotFoundError: No module named 'flash_attn.flash_attn_interface'"},
    "mi300x-rocm7-cuda-packages": {
        "flash_attn_3": "ImportError: libcudart.so.12",
        "sageattention": "ImportError: libcudart.so.12",
    },
    "mi300x-rocm7-flash2-broken": {"flash_attn_2": "ImportError: flash_attn_2_cuda"},
    "rx9070-aiter": {"amd_aiter": "importing it died with SIGSEGV"},
}


def test_every_shipped_machine_has_its_golden_order():
    assert machine_names() == tuple(sorted(MACHINES))


@pytest.mark.parametrize("name", MACHINES)
def test_golden_order_and_dtype(name):
    facts = load_machine(name)
    platform = platform_named(facts.platform)
    assert (facts.platform, facts.arch, platform.automatic_order(facts), platform.default_dtype(facts)) == MACHINES[
        name
    ]
    assert all(device.memory_bytes is None or device.memory_bytes > 8 * GIB for device in facts.devices)
    assert (facts.cuda_version is not None) == (facts.platform == "cuda")
    assert (facts.hip_version is not None) == (facts.platform == "rocm")


@pytest.mark.parametrize("name", machine_names())
def test_the_packages_of_a_shipped_machine(name):
    packages = load_machine(name).packages
    assert {key for key, facts in packages.items() if facts.import_error is None} == PACKAGES.get(name, set())
    broken = {key: facts for key, facts in packages.items() if facts.import_error is not None}
    assert broken.keys() == BROKEN.get(name, {}).keys()
    for key, facts in broken.items():
        assert facts.import_error.startswith(BROKEN[name][key])
        assert facts.parameters is None and "\n" not in facts.import_error
    assert all(facts.version for facts in packages.values())


@pytest.mark.parametrize("name", machine_names())
def test_a_shipped_machine_is_one_that_a_probe_could_describe(name):
    """Its packages are of declared kinds, of a declared name, and its switches are ones that a backend reads."""
    facts = load_machine(name)
    declared = {backend.package.key: backend.package for backend in declared_backends().values() if backend.package}
    assert set(facts.packages) <= set(declared)
    for key, package in facts.packages.items():
        assert package.dist.replace("_", "-") in declared[key].dists
        installed = Installed(dist=package.dist, version=package.version)
        assert package.variant == declared[key].variant(installed, facts.env)
    assert set(facts.env) <= {switch for backend in declared_backends().values() for switch in backend.env}
    assert facts.notes == () or facts.platform == "cpu"


def test_radeons_are_described_with_the_switch_of_their_flash_attn():
    for name in ("rx7900", "rx9070"):
        facts = load_machine(name)
        assert facts.env == {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
        assert facts.packages["flash_attn_2"].variant == "triton"


def test_two_generations_of_flash_attn_3_are_told_apart_by_their_parameters():
    new, old = (load_machine(name).packages["flash_attn_3"].parameters for name in ("h200", "h100"))
    assert set(new) - set(old) == {"return_attn_probs"}


def test_a_machine_whose_accelerator_is_not_used_says_why():
    assert "The NVIDIA driver on your system is too old" in load_machine("h100-old-driver").notes[0]
    assert "torch_npu 2.9.0 is installed, but torch hasn't loaded it" in load_machine("ascend910b-broken-cann").notes[0]


@pytest.mark.parametrize("name", machine_names())
def test_a_described_machine_survives_its_file(name, tmp_path):
    facts = load_machine(name)
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(facts.to_json()), encoding="utf-8")
    assert load_machine(file) == load_machine(str(file)) == facts


def test_packages_and_notes_survive_a_file(tmp_path):
    package = PackageFacts(dist="flash-attn", version="2.8.3", parameters=("q", "k"), import_error="OSError: no")
    device = DeviceFacts(arch="gfx942", name="AMD")
    facts = MachineFacts(
        platform="rocm", devices=(device,), packages={"flash_attn_2": package}, env={"A": "1"}, notes=("one", "two")
    )
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(facts.to_json()), encoding="utf-8-sig")
    assert load_machine(file) == facts


def test_a_file_may_say_no_more_than_its_platform(tmp_path):
    (tmp_path / "m.json").write_text('{"platform": "cuda"}', encoding="utf-8")
    assert load_machine(tmp_path / "m.json") == MachineFacts(platform="cuda")


@pytest.mark.parametrize(
    ("asked", "near"), [("H200", "h200"), ("h20", "h200"), ("mi300x", "mi300x-rocm7"), ("rtx-4090", "rtx4090")]
)
def test_an_unknown_machine_gets_the_nearest_and_the_list(asked, near):
    with pytest.raises(RequestError) as caught:
        load_machine(asked)
    assert f"machine {asked!r} is neither a file nor shipped, did you mean {near!r}?" in caught.value.message
    assert all(name in caught.value.message for name in machine_names())


@pytest.mark.parametrize("asked", ["", "zzz", "no/such/file.json", "x" * 5000, "a\0b", "../machines"])
def test_a_name_that_could_be_nothing(asked):
    with pytest.raises(RequestError, match="neither a file nor shipped"):
        load_machine(asked)


def test_a_directory_is_no_machine(tmp_path):
    with pytest.raises(RequestError, match="is a directory"):
        load_machine(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "isn't JSON"),
        ("{", "isn't JSON"),
        ("[" * 100_000, "isn't JSON"),
        ("[]", "it holds a list, not an object"),
        ("null", "it holds a NoneType, not an object"),
        ("{}", "platform is missing, it must be text"),
        ('{"platform": "vulkan"}', "platform is 'vulkan', there are cpu, cuda, mps, musa, npu, rocm, xpu"),
        ('{"platform": 3}', "platform is 3, it must be text"),
        ('{"platform": "cuda", "gpu": 1}', "gpu is unknown, there are platform, devices, torch_version"),
        ('{"platform": "cuda", "devices": {}}', "devices is {}, it must be a list"),
        ('{"platform": "cuda", "devices": ["h200"]}', "devices[0] is 'h200', it must be an object"),
        ('{"platform": "cuda", "devices": [{"arch": "sm90"}]}', "devices[0].name is missing, it must be text"),
        (
            '{"platform": "cuda", "devices": [{"arch": "sm90", "name": "x", "memory": 1}]}',
            "devices[0].memory is unknown, there are arch, name, memory_bytes",
        ),
        (
            '{"platform": "cuda", "devices": [{"arch": "sm90", "name": "x", "memory_bytes": true}]}',
            "devices[0].memory_bytes is True, it must be a whole number above 0 or null",
        ),
        ('{"platform": "cuda", "cuda_version": 13.0}', "cuda_version is 13.0, it must be text or null"),
        ('{"platform": "cuda", "notes": "x"}', "notes is 'x', it must be a list of texts"),
        ('{"platform": "cuda", "env": {"A": 1}}', "env is {'A': 1}, it must be an object of texts"),
        ('{"platform": "cuda", "packages": []}', "packages is [], it must be an object"),
        ('{"platform": "cuda", "packages": {"x": {}}}', "packages.x.dist is missing, it must be text"),
        (
            '{"platform": "cuda", "packages": {"x": {"dist": "x", "parameters": [1]}}}',
            "packages.x.parameters is [1], it must be a list of texts or null",
        ),
    ],
    ids=range(20),
)
def test_a_malformed_machine_names_its_file_and_what_is_wrong(tmp_path, text, said):
    file = tmp_path / "my machine.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        load_machine(file)
    assert caught.value.message.startswith(f"machine file {file} ")
    assert said in caught.value.message


def test_everything_wrong_with_a_machine_is_said_at_once(tmp_path):
    file = tmp_path / "m.json"
    file.write_text('{"gpu": 1, "notes": 2, "devices": [{}]}', encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        load_machine(file)
    assert len(caught.value.details["problems"]) == 5


@pytest.mark.parametrize("data", [b"\xff\xfe{\x00", b"\x89PNG\r\n\x1a\n", bytes(range(256))])
def test_a_file_that_is_no_text(tmp_path, data):
    (tmp_path / "m.json").write_bytes(data)
    with pytest.raises(RequestError, match=r"isn't JSON|carries no Safelight metadata"):
        load_machine(tmp_path / "m.json")
