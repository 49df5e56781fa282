"""What the declared backends say about machines and layers: the verdicts that matter, on made-up machines."""

import re

import pytest

from safelight.attention import (
    AttentionRequirements,
    BackendPreference,
    LayerGroup,
    build_plan,
    declared_backends,
    select_backend,
)
from safelight.attention.select import why_not
from safelight.errors import BackendUnavailableError, CapabilityError, SelectionError
from safelight.platforms import PackageFacts, platform_named
from safelight.platforms.packages import Installed
from tests.unit.made_machines import FLAG, machine, with_release

BACKENDS = declared_backends()
DECLARED = [pytest.param(backend, id=name) for name, backend in BACKENDS.items()]
PACKAGED = [pytest.param(backend, id=name) for name, backend in BACKENDS.items() if backend.package is not None]

SELF = AttentionRequirements(
    head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12, role="self", equal_lengths=True
)
CROSS = SELF.replace(role="cross", equal_lengths=False)


def reasons(name, requirements, where, *, kind=None):
    """What stands against a backend that a person asked for, as texts."""
    found = why_not(name, requirements, where, BACKENDS, is_explicit=True)
    return [reason.detail for reason in found if kind in (None, reason.kind)]


def flag(name, names=""):
    return BackendPreference(name, "`--attention` flag", True, names)


def plan(groups, where, *preferences):
    """The backend and the reason for each group."""
    made = build_plan([LayerGroup(requirements=g, count=1) for g in groups], where, [preferences], BACKENDS)
    return [(layer.selection.backend, layer.selection.reason) for layer in made.layers]


# Architectures


@pytest.mark.parametrize(
    ("platform", "arch", "expected"),
    [
        ("cuda", "sm75", {"sdpa", "sliding_tile"}),
        ("cuda", "sm80", {"cudnn", "flash2", "flashinfer", "flex", "sage", "sdpa", "sliding_tile", "xformers"}),
        ("cuda", "sm86", {"cudnn", "flash2", "flashinfer", "flex", "sage", "sdpa", "sliding_tile", "xformers"}),
        ("cuda", "sm89", {"cudnn", "flash2", "flashinfer", "flex", "sage", "sdpa", "sliding_tile", "xformers"}),
        (
            "cuda",
            "sm90",
            {"cudnn", "flash2", "flash3", "flash4", "flashinfer", "flex", "sage", "sdpa", "sliding_tile", "xformers"},
        ),
        ("cuda", "sm100", {"cudnn", "flash2", "flash4", "flashinfer", "flex", "sage3", "sdpa", "sliding_tile"}),
        ("cuda", "sm103", {"cudnn", "flash2", "flash4", "flashinfer", "flex", "sdpa", "sliding_tile"}),
        ("cuda", "sm120", {"cudnn", "flash2", "flashinfer", "flex", "sage", "sage3", "sdpa", "sliding_tile"}),
        ("cuda", "sm121", {"cudnn", "flash2", "flashinfer", "flex", "sage", "sage3", "sdpa", "sliding_tile"}),
        ("rocm", "gfx90a", {"flash2", "flex", "sdpa", "sliding_tile"}),
        ("rocm", "gfx942", {"aiter", "aiter_fp8", "flash2", "flex", "sdpa", "sliding_tile"}),
        ("rocm", "gfx950", {"aiter", "aiter_fp8", "flash2", "flex", "sdpa", "sliding_tile"}),
        ("rocm", "gfx1201", {"flex", "sdpa", "sliding_tile"}),
        ("npu", "ascend910b", {"ascend", "ascend_fusion", "laser", "sdpa", "sliding_tile"}),
        ("npu", "ascend950", {"ascend", "ascend_fusion", "sdpa", "sliding_tile"}),
        ("npu", "ascend310p", {"sdpa", "sliding_tile"}),
        ("xpu", "xpu-bmg-g21", {"flex", "sdpa", "sliding_tile", "xpu_flash"}),
        ("xpu", "xpu-mtl-h", {"flex", "sdpa", "sliding_tile"}),
        ("musa", "musa-mp31", {"mate", "sdpa", "sliding_tile"}),
        ("musa", "musa-mp22", {"sdpa", "sliding_tile"}),
        ("mps", "mps", {"sdpa", "sliding_tile"}),
        ("cpu", "cpu-avx2", {"sdpa", "sliding_tile"}),
    ],
)
def test_which_kernels_there_are_with_everything_installed(platform, arch, expected) -> None:
    """Whole sets: a package that is there doesn't count on another vendor's device."""
    assert {name for name in BACKENDS if not reasons(name, SELF, machine(platform, arch))} == expected


@pytest.mark.parametrize(
    ("arch", "variant", "env", "fits"),
    [
        ("gfx90a", None, {}, True),
        ("gfx942", None, {}, True),
        ("gfx942", "triton", {}, True),
        ("gfx1100", None, {}, False),
        ("gfx1100", "triton", {}, True),
        ("gfx1201", "triton", {}, True),
        ("gfx1201", "ck", {}, False),
        ("gfx1201", None, {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}, True),
        ("gfx1201", None, {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "FALSE"}, False),
        ("gfx1030", "triton", {}, False),
        ("gfx908", None, {}, False),
    ],
)
def test_flash2_on_rocm_depends_on_the_build(arch, variant, env, fits) -> None:
    release = PackageFacts(dist="flash-attn", version="2.8.3", variant=variant)
    found = reasons("flash2", SELF, machine("rocm", arch, {"flash_attn_2": release}, env=env))
    assert len(found) == (0 if fits else 1)
    assert fits or f"this device is {arch}" in found[0]


def test_the_switch_of_flash2_s_triton_build_tells_the_variant() -> None:
    declared = BACKENDS["flash2"].package
    installed = Installed(dist="flash-attn", version="2.8.3")
    (switch,) = BACKENDS["flash2"].env
    assert [declared.variant(installed, {switch: value}) for value in ("TRUE", "FALSE", "1")] == ["triton", None, None]
    on_cuda = machine("cuda", "sm90", env={switch: "TRUE"})
    assert reasons("flash2", SELF, on_cuda, kind="package") == [
        f"{switch}=TRUE makes it call its kernels for AMD; unset it"
    ]


@pytest.mark.parametrize("arch", ["sm100", "sm103", "sm120", "sm121"])
@pytest.mark.parametrize(
    ("version", "cuda_version", "problems"),
    [
        ("2.8.0", "12.8", []),
        ("2.8.3.post2+cu13torch2.13", "13.0", []),
        ("2.7.4.post1", "12.8", ["2.8.0 has it"]),
        (None, "13.0", ["no known version", "version unknown"]),
        ("2.8.3", "12.6", ["12.8 is the first"]),
        ("2.8.3", None, ["version unknown"]),
        ("2.7.0", "12.4", ["2.8.0 has it", "12.8 is the first"]),
    ],
)
def test_flash2_on_blackwell_where_its_build_has_code_for_it(arch, version, cuda_version, problems) -> None:
    release = PackageFacts(dist="flash-attn", version=version)
    found = reasons("flash2", SELF, machine("cuda", arch, {"flash_attn_2": release}, cuda_version=cuda_version))
    assert len(found) == len(problems)
    assert all(problem in detail for problem, detail in zip(problems, found, strict=True))
    # An older architecture asks for none of it, and no CUDA version is an answer too.
    if version not in ("2.7.0", None):
        older = machine("cuda", "sm89", {"flash_attn_2": release}, cuda_version=None)
        assert reasons("flash2", SELF, older) == []


# Releases


@pytest.mark.parametrize(
    ("parameters", "detail"),
    [
        (("q", "k", "v", FLAG), None),
        (("q", "k", "v"), "no LSE (this release has no parameter return_attn_probs)"),
        (None, "no LSE that is known of (the facts lack this release's parameters)"),
    ],
)
def test_flash3_gives_lse_in_the_releases_that_can_be_asked_for_it(parameters, detail) -> None:
    where = with_release("cuda", "sm90", "flash_attn_3", version="3.0.0", parameters=parameters)
    assert reasons("flash3", SELF, where) == []
    assert reasons("flash3", SELF.replace(needs_lse=True), where) == ([] if detail is None else [detail])


@pytest.mark.parametrize(
    ("version", "changes", "kind"),
    [
        ("2.2.0", {"head_dim": 72}, None),
        ("2.2.0", {"needs_lse": True}, None),
        ("2.2.0", {"head_dim": 160}, "capability"),
        ("2.0.1", {}, "package"),
        ("1.0.6", {}, None),
        ("1.0.6", {"head_dim": 96}, None),
        ("1.0.6", {"head_dim": 72}, "capability"),
        ("1.0.6", {"needs_lse": True}, "capability"),
        (None, {}, None),
        (None, {"head_dim": 72}, "capability"),
        (None, {"needs_lse": True}, "capability"),
    ],
)
def test_what_sage_can_do_depends_on_the_release(version, changes, kind) -> None:
    where = with_release("cuda", "sm89", "sageattention", version=version)
    found = why_not("sage", SELF.replace(**changes), where, BACKENDS, is_explicit=True)
    assert [reason.kind for reason in found] == ([] if kind is None else [kind])


def test_sage3_needs_a_cuda_that_knows_the_device() -> None:
    (detail,) = reasons("sage3", SELF, machine("cuda", "sm120", cuda_version="12.6"))
    assert detail == "it can't be built for CUDA 12.6: 12.8 is the first"
    assert reasons("sage3", SELF, machine("cuda", "sm120", cuda_version=None)) == []


@pytest.mark.parametrize("version", ["4.0.0b35", "4.0.0b1"])
def test_an_early_beta_of_flash4_is_too_old(version) -> None:
    assert "too old" in reasons("flash4", SELF, with_release("cuda", "sm100", "flash_attn_4", version=version))[0]


# Capabilities


@pytest.mark.parametrize(
    ("head_dim", "cuda", "blackwell"),
    [
        (
            64,
            {"cudnn", "flash2", "flash3", "flash4", "flashinfer", "flex", "sage", "xformers"},
            {"cudnn", "flash4", "sage3"},
        ),
        (72, {"cudnn", "flash2", "flash3", "flash4", "flex", "sage", "xformers"}, {"cudnn", "flash4"}),
        (80, {"cudnn", "flash2", "flash3", "flash4", "flex", "sage", "xformers"}, {"cudnn", "flash4"}),
        (90, {"flash2", "flex", "sage"}, set()),
        (160, {"flash2", "flash3", "flash4", "flex", "xformers"}, set()),
        (256, {"flash2", "flash3", "flash4", "flashinfer", "flex", "xformers"}, set()),
        (512, set(), set()),
    ],
)
def test_head_dims(head_dim, cuda, blackwell) -> None:
    need = SELF.replace(head_dim=head_dim)
    always = {"sdpa", "sliding_tile"}
    assert {name for name in BACKENDS if not reasons(name, need, machine("cuda", "sm90"))} == cuda | always
    on_b200 = {name for name in BACKENDS if not reasons(name, need, machine("cuda", "sm100"))}
    assert on_b200 - {"flash2", "flashinfer", "flex"} == blackwell | always


@pytest.mark.parametrize(
    ("changes", "takers"),
    [
        ({"mask": "key_padding"}, {"ascend", "ascend_fusion", "cudnn", "flex", "sdpa", "xformers"}),
        ({"mask": "dense"}, {"cudnn", "flex", "sdpa", "xformers"}),
        ({"mask": "bias"}, {"cudnn", "flex", "sdpa", "xformers"}),
        ({"dtype": "float32"}, {"ascend_fusion", "flex", "sdpa", "sliding_tile"}),
        ({"dtype": "float64"}, {"sdpa"}),
        (
            {"packed_varlen": True},
            {
                "aiter",
                "ascend",
                "flash2",
                "flash3",
                "flash4",
                "flashinfer",
                "flex",
                "mate",
                "sdpa",
                "xformers",
                "xpu_flash",
            },
        ),
        (
            {"needs_lse": True},
            {
                "aiter",
                "ascend",
                "ascend_fusion",
                "cudnn",
                "flash2",
                "flash3",
                "flash4",
                "flashinfer",
                "flex",
                "sage",
                "sdpa",
                "xformers",
            },
        ),
        ({"packed_varlen": True, "mask": "key_padding"}, set()),
    ],
)
def test_who_takes_what_somewhere(changes, takers) -> None:
    """On the device that suits each best: no kernel says yes to what its functions can't be told."""
    places = [
        machine(platform, arch)
        for platform, arches in {
            "cuda": ("sm90", "sm100", "sm120"),
            "rocm": ("gfx942",),
            "npu": ("ascend910b",),
            "xpu": ("xpu-pvc",),
            "musa": ("musa-mp31",),
            "cpu": ("cpu-avx512",),
        }.items()
        for arch in arches
    ]
    need = SELF.replace(**changes)
    assert {name for name in BACKENDS if any(not reasons(name, need, where) for where in places)} == takers


@pytest.mark.parametrize(
    ("changes", "refuse"),
    [
        ({"num_kv_heads": 4}, {"laser", "sage3", "sliding_tile"}),
        ({"causal": True}, {"laser", "sliding_tile"}),
        ({"scale": 1.0}, {"sage3"}),
        ({"role": "joint"}, {"laser"}),
        ({"role": "cross", "equal_lengths": False}, {"laser", "sliding_tile"}),
        ({"role": "cross", "equal_lengths": False, "causal": True}, {"laser", "sage", "sage3", "sliding_tile"}),
    ],
)
def test_who_refuses_what_most_kernels_take(changes, refuse) -> None:
    places = {"laser": machine("npu", "ascend910b"), "sage3": machine("cuda", "sm120")}
    need = SELF.replace(**changes)
    where = machine("cuda", "sm90")
    found = {n for n in BACKENDS if reasons(n, need, places.get(n, where), kind="capability")}
    assert found == refuse


def test_ascend_has_limits_on_heads() -> None:
    where = machine("npu", "ascend910b")
    assert reasons("ascend", SELF.replace(num_heads=256, num_kv_heads=4), where) == []
    assert reasons("ascend", SELF.replace(num_heads=320, num_kv_heads=320), where) == ["no 320 heads (takes 256)"]
    assert reasons("ascend", SELF.replace(num_heads=128, num_kv_heads=1), where) == [
        "no 128 heads on 1 (takes 64 on each)"
    ]


# Field cases


@pytest.mark.parametrize("backend", [p for p in DECLARED if "float32" not in p.values[0].dtypes])
def test_dx_007_a_16_bit_kernel_never_gets_float32(backend) -> None:
    platform = min(backend.platforms)
    where = machine(platform, backend.arches.get(platform, ("gfx942",))[0])
    need = SELF.replace(dtype="float32")
    with pytest.raises(CapabilityError, match=r"no dtype float32 \(takes bfloat16, float16\)"):
        select_backend(need, where, flag(backend.name), backends=BACKENDS)
    habit = BackendPreference(backend.name, "platform default", False)
    selection = select_backend(need, where, habit, backends=BACKENDS)
    assert (selection.backend, selection.reason) == ("sdpa", "platform default fallback")
    assert selection.rejected[0].backend == backend.name


REFINER = SELF.replace(component="token_refiner", is_auxiliary=True)


@pytest.mark.parametrize(
    ("name", "where"),
    [("sliding_tile", ("cuda", "sm90")), ("sliding_tile", ("cpu", "cpu-avx2")), ("laser", ("npu", "ascend910b"))],
)
def test_dx_053_made_for_self_attention_stays_there(name, where) -> None:
    where = machine(*where)
    dense = platform_named(where.platform).automatic_order(where)[0]
    layers = [SELF, CROSS, REFINER.replace(mask="key_padding")]
    asked = (name, None)
    falls_back = [
        (dense, "dense cross-attention fallback"),
        (plan(layers, where)[2][0], "not required for token_refiner"),
    ]
    assert plan(layers, where, flag(name)) == [asked, *falls_back]
    assert plan(layers, where, flag(name, "transformer"))[:2] == [asked, falls_back[0]]
    assert plan(layers, where, flag(name, "transformer.self"))[:1] == [asked]
    for named in ("transformer.cross", "token_refiner"):
        with pytest.raises(CapabilityError):
            plan(layers, where, flag(name, named))


def test_dx_053_a_refiner_has_no_tiles() -> None:
    where = machine("cuda", "sm90")
    assert plan([SELF, REFINER], where, flag("sta"))[1] == ("flash3", "not required for token_refiner")
    assert reasons("sliding_tile", REFINER, where) == ["no token grid to make tiles of in token_refiner"]


HEADS = [
    SELF.replace(head_dim=64),
    SELF.replace(head_dim=80, component="image_encoder", is_auxiliary=True),
    SELF.replace(head_dim=512, num_heads=1, num_kv_heads=1, component="vae", is_auxiliary=True),
]


@pytest.mark.parametrize(
    ("version", "encoder"), [("1.0.6", ("flash2", "not required for image_encoder")), ("2.2.0", ("sage", None))]
)
def test_dx_085_head_dims_that_a_kernel_lacks(version, encoder) -> None:
    import torch

    untouched = torch.nn.functional.scaled_dot_product_attention
    where = with_release("cuda", "sm89", "sageattention", version=version)
    assert plan(HEADS, where, flag("sage")) == [("sage", None), encoder, ("sdpa", "not required for vae")]
    assert plan(HEADS, where) == [(name, "platform default") for name in ("flash2", "flash2", "sdpa")]
    with pytest.raises(CapabilityError, match="no head_dim 512"):
        plan(HEADS, where, flag("sage"), flag("sage", "vae"))
    assert torch.nn.functional.scaled_dot_product_attention is untouched


@pytest.mark.parametrize("backend", PACKAGED)
def test_dx_088_a_kernel_that_isn_t_there_is_refused_when_planned(backend) -> None:
    platform = min(backend.platforms)
    arch = backend.arches.get(platform, ("gfx942",))[0]
    broken = {backend.package.key: PackageFacts(dist="any", version="99", import_error="OSError: libmissing.so.1")}
    for packages, problem in (({}, "is not installed"), (broken, "libmissing.so.1")):
        for named in ("", "transformer", "transformer.self"):
            with pytest.raises(SelectionError, match=re.escape(problem)) as caught:
                plan([SELF], machine(platform, arch, packages), flag(backend.name, named))
            assert type(caught.value) is BackendUnavailableError
