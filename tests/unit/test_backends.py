"""The declared backends: each holds to the catalogue, and can judge any machine."""

import re
from pathlib import Path

import pytest

from safelight.attention import AttentionRequirements, Reason, declared_backends
from safelight.attention import backends as package
from safelight.attention.requirements import MASKS
from safelight.attention.select import why_not
from safelight.attention.versions import is_at_least
from safelight.platforms import MachineFacts, PackageFacts, platforms
from safelight.platforms.packages import Installed
from tests.unit.made_machines import GOOD, machine

BACKENDS = declared_backends()
DECLARED = [pytest.param(backend, id=name) for name, backend in BACKENDS.items()]
PACKAGED = [pytest.param(backend, id=name) for name, backend in BACKENDS.items() if backend.package is not None]

# What an architecture of each platform is called; platforms that aren't here have no table of them.
ARCHES = {
    "cuda": r"sm(80|86|89|90|100|103|120|121)",
    "rocm": r"gfx(90a|942|950|1100|1201)",
    "npu": r"ascend(910b|910c|950)",
    "xpu": r"xpu-(pvc|pvc-vg|bmg-g21|bmg-g31|lnl-m)",
    "musa": r"musa-mp31",
}
DTYPES = {"float16", "bfloat16", "float32", "float64"}

SELF = AttentionRequirements(
    head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12, role="self", equal_lengths=True
)
CROSS = SELF.replace(role="cross", equal_lengths=False)
TEXT = SELF.replace(component="text_encoder", is_auxiliary=True)


# Every declaration


def test_a_file_holds_the_backend_of_its_name() -> None:
    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")} - {"__init__"}
    assert files == set(BACKENDS)


def test_every_platform_s_order_names_declared_backends() -> None:
    arches = ["sm80", "sm90", "sm100", "sm103", "sm120", "gfx90a", "gfx942", "gfx1201", "any"]
    named = {
        name
        for platform in platforms()
        for arch in arches
        for name in platform.automatic_order(machine(platform.name, arch))
    }
    assert named <= set(BACKENDS)
    assert [name for name in named if BACKENDS[name].is_sparse or BACKENDS[name].is_lossy] == []


def test_no_two_backends_share_a_name() -> None:
    names = [name for backend in BACKENDS.values() for name in (backend.name, *backend.aliases)]
    assert sorted(names) == sorted(set(names))
    assert [name for name in names if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or name == "auto"] == []


def test_packages_of_one_key_are_one_package() -> None:
    """Two backends of one package say the same of it: the facts hold it once."""
    packages = [backend.package for backend in BACKENDS.values() if backend.package is not None]
    by_key = {package.key: package for package in packages}
    assert all(package == by_key[package.key] for package in packages)
    assert sorted(by_key) == sorted(GOOD)


@pytest.mark.parametrize("backend", DECLARED)
def test_a_declaration_uses_the_words_that_there_are(backend) -> None:
    assert backend.platforms <= {platform.name for platform in platforms()}
    assert set(backend.arches) <= backend.platforms
    for platform, arches in backend.arches.items():
        assert [arch for arch in arches if not re.fullmatch(ARCHES[platform], arch)] == []
        assert len(set(arches)) == len(arches) > 0
    assert backend.dtypes <= DTYPES and backend.dtypes
    assert {"none"} <= backend.masks <= set(MASKS)
    assert 10 < len(backend.summary) < 90 and not backend.summary.endswith(".")
    assert not (backend.self_only and backend.is_sparse), "sparse says it already"


@pytest.mark.parametrize("backend", DECLARED)
def test_the_text_on_head_dims_says_what_the_test_does(backend) -> None:
    if backend.head_dims is None:
        assert backend.head_dims_text == "any"
        return
    numbers = [int(number) for number in re.findall(r"\d+", backend.head_dims_text)]
    assert backend.head_dims(numbers[-1])
    assert not any(backend.head_dims(numbers[-1] + more) for more in (1, 8, 16, 64, 128, 256))
    is_list = re.fullmatch(r"[\d, ]+", backend.head_dims_text) is not None
    assert backend.head_dims(72) == (not is_list)
    assert backend.head_dims(76) == (not is_list and "multiples" not in backend.head_dims_text)


@pytest.mark.parametrize("backend", PACKAGED)
def test_a_package_says_how_it_is_recognised_and_installed(backend) -> None:
    declared = backend.package
    assert re.fullmatch(r"[a-z0-9_]+", declared.key)
    assert declared.dists and declared.module and declared.function
    assert len(declared.remedy) > 10 and "://" not in declared.remedy and not declared.remedy.endswith(".")
    assert [name for name in declared.needs if "." in name] == []
    assert declared.owns is None or re.fullmatch(r"(\w+/)+\w+\.py", declared.owns)
    assert declared.min_version is None or is_at_least(declared.min_version, declared.min_version)


@pytest.mark.parametrize("backend", PACKAGED)
def test_a_variant_is_told_from_what_it_is_given(backend) -> None:
    env = dict.fromkeys(backend.env, "TRUE")
    installed = Installed(dist=backend.package.dists[0], version="0", files=frozenset({"a/b.py"}))
    assert backend.package.variant(installed, {}) is None
    assert backend.package.variant(installed, env) == backend.package.variant(installed, dict(env))
    assert set(env) == set(backend.env), "nothing was written into it"


@pytest.mark.parametrize("backend", DECLARED)
@pytest.mark.parametrize("platform", [platform.name for platform in platforms()])
def test_a_declaration_can_judge_any_machine(backend, platform) -> None:
    """No device, no version, no package, or packages of which only the name is known."""
    unknown = {key: PackageFacts(dist=facts.dist) for key, facts in GOOD.items()}
    odd = {key: PackageFacts(dist=facts.dist, version="built by hand") for key, facts in GOOD.items()}
    needs = [
        SELF,
        CROSS,
        TEXT,
        SELF.replace(needs_lse=True, packed_varlen=True, mask="dense"),
        SELF.replace(head_dim=1),
    ]
    for packages in ({}, GOOD, unknown, odd):
        for cuda_version in (None, "", "11", "12.8", "unknown"):
            for arch in ("unknown", "sm120", "gfx1201"):
                where = machine(platform, arch, packages, cuda_version=cuda_version)
                for need in (*needs, CROSS.replace(causal=True)):
                    found = backend.why_not(need, where)
                    assert found == backend.why_not(need, where)
                    assert all(isinstance(reason, Reason) and reason.detail for reason in found)
    nothing = MachineFacts(platform=platform)
    assert isinstance(backend.why_not(SELF, nothing), tuple)


@pytest.mark.parametrize("backend", [p for p in DECLARED if p.values[0].load is None])
def test_a_declaration_without_a_callable_plans_and_doesn_t_run(backend) -> None:
    where = next(
        machine(platform, arch)
        for platform in sorted(backend.platforms) or ["cpu"]
        for arch in backend.arches.get(platform, ("gfx942",))
    )
    assert why_not(backend.name, SELF, where, BACKENDS, is_explicit=True) == ()
    found = why_not(backend.name, SELF, where, BACKENDS, is_explicit=True, runs_here=True)
    assert found == (Reason("package", "adapter not built yet"),)


# Names that people know


@pytest.mark.parametrize(
    ("known", "name"),
    [
        ("fa", "flash2"),
        ("fa2", "flash2"),
        ("flash_attn", "flash2"),
        ("flash_attention_2", "flash2"),
        ("fa3", "flash3"),
        ("_flash_3", "flash3"),
        ("flash_attention_3", "flash3"),
        ("fa4", "flash4"),
        ("torch_sdpa", "sdpa"),
        ("native", "sdpa"),
        ("_native_cudnn", "cudnn"),
        ("sage_attn", "sage"),
        ("sageattn", "sage"),
        ("sage_attn_3", "sage3"),
        ("xformers_memory_efficient_attention", "xformers"),
        ("flex_attention", "flex"),
        ("ascend_fa", "ascend"),
        ("npu", "ascend"),
        ("laser_attention", "laser"),
        ("sta", "sliding_tile"),
        ("sliding_tile_attn", "sliding_tile"),
    ],
)
def test_a_known_name_is_an_alias(known, name) -> None:
    assert [backend.name for backend in BACKENDS.values() if known in backend.aliases] == [name]


@pytest.mark.parametrize("pinned", ["_native_math", "_native_flash", "_native_efficient", "flash_hub", "sage_hub"])
def test_a_name_for_another_kernel_is_no_alias(pinned) -> None:
    """Who asks for one of torch's kernels, or for a downloaded one, would get another under these names."""
    assert [backend.name for backend in BACKENDS.values() if pinned in (backend.name, *backend.aliases)] == []
