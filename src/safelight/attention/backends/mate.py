"""mate: flash attention of Moore Threads' MUSA AI Tensor Engine."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor

LSE_FLAG = "return_softmax_lse"


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from mate.mha_interface import flash_attn_varlen_func

    from safelight.attention.masks import clear_blind, clear_blind_packed, empty_result, with_dense_features

    needs_lse = requirements.needs_lse
    # Only where it is needed: not every release has the parameter.
    asked = {LSE_FLAG: True} if needs_lse else {}

    def mate(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        assert mask is None, "mate takes no mask"
        if q.shape[1] == 0 or k.shape[1] == 0:
            return empty_result(q, with_lse=needs_lse)
        q, v = with_dense_features(q, v)
        # Its kernel takes K to end as many elements after its start as it has, and reads zeros beyond.
        k = k.contiguous()
        options = {"softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale, "causal": causal, **asked}
        lse = None
        if layout is None or layout.offsets is None:
            out = flash_attn_varlen_func(q, k, v, **options)
            if needs_lse:
                out, lse = out
            clear_blind(out, lse, k.shape[1], causal=causal)
        else:
            longest, longest_keys = layout.longest
            out = flash_attn_varlen_func(
                q[0],
                k[0],
                v[0],
                cu_seqlens_q=layout.offsets,
                cu_seqlens_k=layout.offsets if layout.key_offsets is None else layout.key_offsets,
                max_seqlen_q=longest,
                max_seqlen_k=longest_keys,
                **options,
            )
            if needs_lse:
                out, lse = out
                lse = lse[None]
            out = out[None]
            clear_blind_packed(out, lse, layout, causal=causal)
        return (out, lse) if needs_lse else out

    return mate


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 128, and 256."""
    # Between those it has a kernel for keys of 192 with values of 128 alone.
    return (head_dim % 8 == 0 and head_dim <= 128) or head_dim == 256


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """LSE only from a release that is known to have the parameter that asks for it."""
    package = machine.packages.get("mate")
    if not requirements.needs_lse or package is None or package.import_error is not None:
        return ()
    if package.parameters is None:
        return (Reason("capability", "no LSE that is known of (the facts lack this release's parameters)"),)
    if LSE_FLAG not in package.parameters:
        return (Reason("capability", f"no LSE (this release has no parameter {LSE_FLAG})"),)
    return ()


BACKEND = AttentionBackend(
    name="mate",
    summary="Moore Threads' MUSA AI Tensor Engine (mate)",
    load=load,
    aliases=("mate_fa", "mate_flash", "musa_fa", "musa_flash"),
    platforms=frozenset({"musa"}),
    arches={"musa": ("musa-mp31",)},
    package=Package(
        key="mate",
        dists=("mate",),
        remedy="install Moore Threads' mate from their own wheels or sources; the public package mate is another one",
        owns="mate/mha_interface.py",
        needs=("torch_musa",),
        module="mate.mha_interface",
        function="flash_attn_varlen_func",
    ),
    head_dims=takes,
    head_dims_text="multiples of 8 up to 128 and 256 itself",
    # No key_padding, as with flash2.
    packed_varlen=True,
    # A natural logarithm, [batch, heads, seq] or [heads, total]: its own tests on the device hold it to that.
    lse=True,
    why_not=why_not,
)
