"""flash3, flash4, xpu_flash and mate: what tells releases apart, and what keeps a call on the kernel that it names.

That results are right is the contract's subject. Shapes: B batch, S tokens, H heads, D head_dim.
"""

import contextlib
import sys
from types import ModuleType

import pytest
import torch
from safelight_stand_ins import STAND_INS, signature_of
from safelight_stand_ins.mate import FUNCTION as MATE
from safelight_stand_ins.vllm_xpu import COMPILED

from safelight.attention import AttentionRequirements, declared_backends
from safelight.attention.backend import Layout
from safelight.attention.backends import flash3, flash4, mate, xpu_flash
from safelight.attention.select import why_not
from safelight.platforms import PackageFacts, load_machine
from safelight.platforms.packages import Installed
from tests.unit.made_machines import machine, with_release

BACKENDS = declared_backends()
NAMED = {stand_in.name: stand_in for stand_in in STAND_INS}
NEED = AttentionRequirements(head_dim=64, dtype="bfloat16", num_heads=2, num_kv_heads=2)
WITH_LSE = NEED.replace(needs_lse=True)
ALWAYS, NEVER = NAMED["flash-attn-3 that always returns LSE"], NAMED["flash-attn-3 that never returns LSE"]
NEWEST, FORWARD_ONLY = NAMED["flash-attn-3 3.0.0"], NAMED["fa3-fwd 0.0.3"]
XPU, MATE_STAND_IN = NAMED["vllm-xpu-kernels 0.1.16.2"], NAMED["mate at 99bbf1f"]


def reasons(name, need, where):
    return [(reason.kind, reason.detail) for reason in why_not(name, need, where, BACKENDS, is_explicit=True)]


def tokens(batch=1, length=9, heads=2, head_dim=64, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, length, heads, head_dim, generator=generator).bfloat16() for _ in range(3)]


# flash3: which release it is


def test_the_two_generations_of_flash3_that_cannot_be_told_apart_give_the_same() -> None:
    assert ALWAYS.facts().packages["flash_attn_3"] == NEVER.facts().packages["flash_attn_3"]
    results = []
    for stand_in in (ALWAYS, NEVER, NEWEST):
        with stand_in.installed():
            kernel = flash3.load(NEED)
            packed = kernel(*tokens(length=7), layout=Layout.of_documents((4, 3)))
            results.append((kernel(*tokens()), packed))
    for dense, packed in results[1:]:
        assert torch.equal(dense, results[0][0]) and torch.equal(packed, results[0][1])


def test_flash3_asks_the_newest_for_lse_and_only_where_it_is_needed() -> None:
    for need, asked in ((NEED, False), (WITH_LSE, True)):
        with NEWEST.installed() as calls:
            kernel = flash3.load(need)
            kernel(*tokens())
            kernel(*tokens(length=7), layout=Layout.of_documents((4, 3)))
        assert [call.arguments["return_attn_probs"] for call in calls] == [asked, asked]


@pytest.mark.parametrize("stand_in", [ALWAYS, NEVER])
def test_an_older_flash3_has_no_lse_that_can_be_asked_for(stand_in) -> None:
    detail = "no LSE (this release has no parameter return_attn_probs)"
    assert reasons("flash3", WITH_LSE, stand_in.facts()) == [("capability", detail)]
    assert reasons("flash3", NEED, stand_in.facts()) == []


def test_fa3_fwd_serves_where_flash_attn_3_is_not_installed_and_not_beside_it() -> None:
    with FORWARD_ONLY.installed() as calls:
        flash3.load(NEED)(*tokens())
    assert [call.function for call in calls] == ["fa3-fwd:fa3_fwd_interface.flash_attn_func"]
    with FORWARD_ONLY.installed() as others, NEWEST.installed() as calls:
        flash3.load(NEED)(*tokens())
    assert (len(others), len(calls)) == (0, 1)


def test_a_broken_flash_attn_3_is_not_replaced_by_fa3_fwd(tmp_path, monkeypatch) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with FORWARD_ONLY.installed(), pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        flash3.load(NEED)
    assert "flash_attn_interface" not in sys.modules


@pytest.mark.parametrize(
    ("dist", "expected"),
    [("fa3-fwd", "fa3-fwd"), ("fa3_fwd", "fa3-fwd"), ("FA3_fwd", "fa3-fwd"), ("flash_attn_3", None)],
)
def test_the_smaller_build_of_flash3_is_told_by_its_distribution(dist, expected) -> None:
    assert flash3.variant(Installed(dist=dist, version="0.0.3"), {}) == expected


def test_the_probe_looks_for_fa3_fwd_in_its_own_module() -> None:
    package = flash3.BACKEND.package
    assert package.dists == ("flash-attn-3", "fa3-fwd")
    assert [package.modules.get(dist, package.module) for dist in package.dists] == [
        "flash_attn_interface",
        "fa3_fwd_interface",
    ]


@pytest.mark.parametrize(
    ("changes", "cuda_version", "found"),
    [
        ({}, "13.0", []),
        ({"head_dim": 192}, "13.2", []),
        ({"needs_lse": True}, "13.0", []),
        ({}, "12.8", [("package", "fa3-fwd needs a torch built for CUDA 13, this one's CUDA is 12.8")]),
        ({}, None, [("package", "fa3-fwd needs a torch built for CUDA 13, this one's CUDA is none")]),
        ({"dtype": "float16"}, "13.0", [("capability", "no dtype float16 (fa3-fwd is built for bfloat16 alone)")]),
        (
            {"head_dim": 72},
            "13.0",
            [("capability", "no head_dim 72 (fa3-fwd is built for 64, 96, 128, 192, 256)")],
        ),
        ({"head_dim": 90}, "13.0", [("capability", "no head_dim 90 (takes multiples of 8 up to 256)")]),
    ],
)
def test_what_fa3_fwd_takes(changes, cuda_version, found) -> None:
    where = FORWARD_ONLY.facts().replace(cuda_version=cuda_version)
    assert reasons("flash3", NEED.replace(**changes), where) == found
    if cuda_version == "13.0" and "90" not in str(changes):
        assert reasons("flash3", NEED.replace(**changes), NEWEST.facts()) == []


def test_a_broken_fa3_fwd_is_one_reason() -> None:
    broken = PackageFacts(
        dist="fa3-fwd", version="0.0.3", variant="fa3-fwd", import_error="ImportError: libcudart.so.13"
    )
    where = FORWARD_ONLY.facts().replace(packages={"flash_attn_3": broken}, cuda_version="12.8")
    need = WITH_LSE.replace(dtype="float16")
    assert reasons("flash3", need, where) == [("package", "package fa3-fwd is broken: ImportError: libcudart.so.13")]


# flash4


@pytest.mark.parametrize("name", ["flash-attn-4 4.0.0b36 on sm100", "flash-attn-4 4.0.0b36 on sm90"])
def test_flash4_gives_what_it_was_bound_for_and_leaves_qv_alone(name) -> None:
    layout = Layout.of_documents((4, 3), (2, 5))
    with NAMED[name].installed() as calls:
        assert isinstance(flash4.load(NEED)(*tokens()), torch.Tensor)
        out, lse = flash4.load(WITH_LSE)(*tokens(length=7), layout=layout)
    assert out.shape == (1, 7, 2, 64) and lse.shape == (1, 2, 7)
    assert [call.arguments["qv"] for call in calls] == [None, None]
    assert calls[1].arguments["cu_seqlens_q"].tolist() == [0, 4, 7]
    assert calls[1].arguments["cu_seqlens_k"].tolist() == [0, 2, 7]
    assert (calls[1].arguments["max_seqlen_q"], calls[1].arguments["max_seqlen_k"]) == (4, 5)


# xpu_flash: never the package's attention in Python


def test_xpu_flash_without_its_binary_cannot_be_loaded(monkeypatch) -> None:
    with XPU.installed():
        vendor = sys.modules["vllm_xpu_kernels.flash_attn_interface"]
        monkeypatch.setattr(vendor, "FA2_AVAILABLE", False)
        monkeypatch.setattr(vendor, "FA2_UNAVAILABLE_REASON", "libze_loader.so.1: cannot open")
        with pytest.raises(ImportError, match=r"libze_loader\.so\.1: cannot open"):
            xpu_flash.load(NEED)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", xpu_flash.HEAD_DIMS)
def test_xpu_flash_takes_what_its_wheel_has_a_kernel_for(head_dim, causal) -> None:
    found = reasons("xpu_flash", NEED.replace(head_dim=head_dim, causal=causal), machine("xpu", "xpu-bmg-g21"))
    assert (found == []) == ((head_dim, causal) in COMPILED), found
    if found:
        how = "with" if causal else "without"
        assert found == [
            ("capability", f"no head_dim {head_dim} {how} causal (its wheels have no such kernel)"),
        ]


def test_an_older_wheel_for_xpu_is_refused_since_its_kernels_are_not_known() -> None:
    (found,) = reasons("xpu_flash", NEED, with_release("xpu", "xpu-bmg-g21", "xpu_flash", version="0.1.15"))
    assert found == ("package", "package vllm-xpu-kernels 0.1.15 is too old: 0.1.16.2 is the first that serves")


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 9, 9), (3, 4, 6), (2, 1, 5), (2, 5, 1)])
def test_xpu_flash_packs_the_rows_of_a_batch(batch, queries, keys) -> None:
    q = tokens(batch, queries)[0]
    k, v, _ = tokens(batch, keys, seed=1)
    with XPU.installed() as (calls):
        out = xpu_flash.load(NEED)(q, k, v, causal=True)
    (call,) = calls
    assert call.arguments["cu_seqlens_q"].tolist() == [row * queries for row in range(batch + 1)]
    assert call.arguments["cu_seqlens_k"].tolist() == [row * keys for row in range(batch + 1)]
    assert (call.arguments["max_seqlen_q"], call.arguments["max_seqlen_k"]) == (queries, keys)
    assert call.arguments["fa_version"] == signature_of(call.function).parameters["fa_version"].default
    assert out.shape == q.shape


# mate


def test_mate_is_given_keys_without_gaps_and_the_rest_as_it_is() -> None:
    fused = torch.randn(2, 9, 3, 2, 64).bfloat16()
    q, k, v = fused.unbind(2)
    with MATE_STAND_IN.installed() as calls:
        mate.load(NEED)(q, k, v)
        mate.load(NEED)(q.contiguous(), k.contiguous(), v.contiguous())
    given = calls[0].arguments
    assert given["k"].is_contiguous() and torch.equal(given["k"], k)
    assert given["q"] is q and given["v"] is v, "copied for nothing"
    assert calls[1].arguments["k"].data_ptr() != k.data_ptr()


def test_mate_in_a_release_without_lse_is_not_asked_for_it() -> None:
    parameters = [name for name in signature_of(MATE).parameters if name != "return_softmax_lse"]
    seen = []

    def older(q, k, v, **options):
        seen.append(set(options))
        return torch.zeros_like(q)

    with installed_module("mate.mha_interface", flash_attn_varlen_func=older):
        mate.load(NEED)(*tokens())
        mate.load(NEED)(*tokens(length=7), layout=Layout.of_documents((4, 3)))
    assert all(options <= set(parameters) for options in seen) and len(seen) == 2


@contextlib.contextmanager
def installed_module(name, **attributes):
    """A package with one module, for the length of a `with` block."""
    top = name.partition(".")[0]
    modules = {top: ModuleType(top), name: ModuleType(name)}
    modules[top].__path__ = []
    vars(modules[name]).update(attributes)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for module in modules:
            del sys.modules[module]


@pytest.mark.parametrize(
    ("parameters", "detail"),
    [
        (("q", "k", "v", "return_softmax_lse"), None),
        (("q", "k", "v"), "no LSE (this release has no parameter return_softmax_lse)"),
        (None, "no LSE that is known of (the facts lack this release's parameters)"),
    ],
)
def test_mate_gives_lse_in_the_releases_that_can_be_asked_for_it(parameters, detail) -> None:
    where = with_release("musa", "musa-mp31", "mate", version="0.2.7", parameters=parameters)
    assert reasons("mate", NEED, where) == []
    assert reasons("mate", WITH_LSE, where) == ([] if detail is None else [("capability", detail)])


@pytest.mark.parametrize(
    ("head_dim", "is_taken"),
    [
        (8, True),
        (72, True),
        (76, False),
        (128, True),
        (136, False),
        (192, False),
        (200, False),
        (256, True),
        (264, False),
    ],
)
def test_the_heads_that_mate_has_kernels_for(head_dim, is_taken) -> None:
    assert mate.takes(head_dim) == is_taken


# All of them


@pytest.mark.parametrize("name", ["flash3", "flash4", "mate", "xpu_flash"])
def test_a_mask_never_reaches_a_kernel_without_one(name) -> None:
    stand_in = next(s for s in STAND_INS if s.backend == name)
    q, k, v = tokens()
    with stand_in.installed() as calls:
        kernel = BACKENDS[name].load(NEED)
        with pytest.raises(AssertionError, match=f"{name} takes no mask"):
            kernel(q, k, v, mask=torch.ones(1, 9, dtype=torch.bool))
    assert calls == []


@pytest.mark.parametrize("name", ["flash3", "flash4", "mate", "xpu_flash"])
def test_a_described_machine_runs_it(name) -> None:
    stand_in = next(s for s in STAND_INS if s.backend == name)
    assert reasons(name, NEED, load_machine(stand_in.machine)) == []
