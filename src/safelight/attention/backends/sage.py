"""sage: SageAttention 1 and 2, with keys and queries in 8 bits."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.attention.versions import is_at_least
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor

TRITON_HEAD_DIMS = (64, 96, 128)


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    import inspect

    from sageattention import sageattn

    from safelight.attention.masks import empty_result, with_dense_features

    needs_lse = requirements.needs_lse
    parameters = inspect.signature(sageattn).parameters
    # Version 1 subtracts the keys' mean from the caller's own tensor, and says so with this parameter.
    works_in_place = "smooth_k" in parameters
    # What isn't named would vanish in its **kwargs.
    asked = {"return_lse": True} if needs_lse else {}
    assert not needs_lse or "return_lse" in parameters, "selection refuses LSE of a release that has none"

    def sage(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        assert mask is None and (layout is None or layout.offsets is None), (
            "sage takes neither mask nor packed documents"
        )
        if q.shape[1] == 0 or k.shape[1] == 0:
            return empty_result(q, with_lse=needs_lse)
        q, k, v = with_dense_features(q, k, v)
        return sageattn(
            q,
            k.clone() if works_in_place else k,
            v,
            tensor_layout="NHD",
            is_causal=causal,
            sm_scale=q.shape[-1] ** -0.5 if scale is None else scale,
            **asked,
        )

    return sage


def takes(head_dim: int) -> bool:
    """Up to 128: version 2 pads to 64 or 128."""
    return head_dim <= 128


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """What depends on the release: versions below 2 are another program of the same name, in Triton alone."""
    reasons = []
    if requirements.causal and requirements.role == "cross" and not requirements.equal_lengths:
        reasons.append(Reason("capability", "no causal with unequal lengths of queries and keys"))
    package = machine.packages.get("sageattention")
    return (*reasons, *_in_release(package.version, requirements)) if package is not None else tuple(reasons)


def _in_release(version: str | None, requirements: AttentionRequirements) -> Iterator[Reason]:
    if is_at_least(version, "2"):
        if not is_at_least(version, "2.1.1"):
            yield Reason("package", f"sageattention {version} isn't served: take a version below 2, or 2.1.1 and later")
        return
    # Of an unknown version only what each of them can do is believed.
    release = f"sageattention {version or 'of unknown version'}"
    if requirements.head_dim <= 128 and requirements.head_dim not in TRITON_HEAD_DIMS:
        allowed = ", ".join(map(str, TRITON_HEAD_DIMS))
        yield Reason("capability", f"no head_dim {requirements.head_dim} ({release} takes {allowed})")
    if requirements.needs_lse:
        yield Reason("capability", f"no LSE ({release} returns none)")


BACKEND = AttentionBackend(
    name="sage",
    summary="SageAttention 1 and 2: queries and keys in 8 bits, lossy",
    load=load,
    aliases=("sage1", "sage2", "sage_attn", "sageattn", "sage_attention", "sageattention"),
    platforms=frozenset({"cuda"}),
    # Version 2 looks its kernel up by the exact architecture and raises for any other.
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90", "sm120", "sm121")},
    package=Package(
        key="sageattention",
        dists=("sageattention",),
        remedy="build SageAttention 2 from its sources, or for version 1: pip install sageattention triton",
        needs=("triton",),
        module="sageattention",
        function="sageattn",
    ),
    head_dims=takes,
    head_dims_text="up to 128",
    # No masks: the function swallows what it doesn't know without a word. Its one for packed documents isn't offered:
    # it returns no LSE and smooths the keys of all documents as if they were one.
    lse=True,
    is_lossy=True,
    why_not=why_not,
)
