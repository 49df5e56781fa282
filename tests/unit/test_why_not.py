"""why_not: every reason against one backend for one layer on one machine (rule S6)."""

import pytest

from safelight.attention import AttentionBackend, AttentionRequirements, Reason, declared_backends
from safelight.attention.select import why_not
from safelight.platforms import load_machine
from safelight.platforms.packages import Package

H100 = load_machine("h100")
SELF = AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12)
CROSS = SELF.replace(role="cross")


def backend(name, **fields):
    return AttentionBackend(name=name, summary=f"a made-up {name}", load=None, **fields)


def no_odd_heads(requirements, machine):
    return (Reason("capability", "no odd number of heads"),) if requirements.num_heads % 2 else ()


LIMITED = backend(
    "limited",
    head_dims=lambda head_dim: head_dim == 128,
    head_dims_text="128",
    grouped_query=False,
    causal=False,
    custom_scale=False,
    cross_lengths=False,
)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"dtype": "float32"}, "no dtype float32 (takes bfloat16, float16)"),
        ({"head_dim": 64}, "no head_dim 64 (takes 128)"),
        ({"num_kv_heads": 4}, "no grouped-query (12 heads on 4)"),
        ({"causal": True}, "no causal"),
        ({"mask": "key_padding"}, "no mask key_padding (takes no mask at all)"),
        ({"mask": "dense"}, "no mask dense (takes no mask at all)"),
        ({"mask": "bias"}, "no mask bias (takes no mask at all)"),
        ({"packed_varlen": True}, "no packed varlen"),
        ({"needs_lse": True, "equal_lengths": True}, "no LSE"),
        ({"scale": 1.0}, "no scale 1.0 (takes head_dim ** -0.5)"),
        ({"role": "cross"}, "no unequal lengths of queries and keys"),
    ],
)
def test_a_missing_capability_is_a_reason(changes, detail) -> None:
    reasons = why_not("limited", SELF.replace(**changes), H100, {"limited": LIMITED})
    assert reasons == (Reason("capability", detail),)


def test_blocks_that_are_merged_differ_in_length_unless_all_are_equal() -> None:
    reasons = why_not("limited", SELF.replace(needs_lse=True), H100, {"limited": LIMITED})
    assert [reason.detail for reason in reasons] == ["no LSE", "no unequal lengths of queries and keys"]


def test_the_masks_there_are_stand_beside_the_missing_one() -> None:
    made = backend("x", masks=frozenset({"none", "key_padding", "dense"}))
    (reason,) = why_not("x", SELF.replace(mask="bias"), H100, {"x": made})
    assert reason.detail == "no mask bias (takes dense, key_padding)"


@pytest.mark.parametrize("changes", [{}, {"scale": 128**-0.5}, {"role": "cross", "equal_lengths": True}])
def test_what_a_kernel_can_do_is_no_reason(changes) -> None:
    assert why_not("limited", SELF.replace(**changes), H100, {"limited": LIMITED}) == ()


def test_a_verdict_lists_all_reasons() -> None:
    everything = backend(
        "x",
        platforms=frozenset({"rocm", "mps"}),
        arches={"cuda": ("sm80",)},
        package=Package(key="x_kernels", dists=("x-kernels",), remedy="install it"),
        is_sparse=True,
        is_lossy=True,
        why_not=no_odd_heads,
    )
    need = CROSS.replace(num_heads=11, num_kv_heads=1, mask="bias", needs_lse=True)
    reasons = why_not("x", need, H100, {"x": everything}, frozenset({"sdpa"}))
    assert reasons == (
        Reason("platform", "runs on mps, rocm, this machine is cuda"),
        Reason("arch", "has code for sm80, this device is sm90"),
        Reason("package", "package x-kernels is not installed (install it)"),
        Reason("scope", "not supported by this attention layer"),
        Reason("capability", "no mask bias (takes no mask at all)"),
        Reason("capability", "no LSE"),
        Reason("capability", "no role cross (a sparse kernel has nothing to leave out there)"),
        Reason("capability", "no odd number of heads"),
        Reason("policy", "sparse kernels change the picture and are never taken unasked"),
    )


def test_metal_has_no_float64() -> None:
    backends = declared_backends()
    assert why_not("sdpa", SELF.replace(dtype="float64"), H100, backends) == ()
    (reason,) = why_not("sdpa", SELF.replace(dtype="float64"), load_machine("m4-max"), backends)
    assert reason == Reason("capability", "no dtype float64 on mps (Metal has none)")
