"""mate: flash attention of Moore Threads' MUSA AI Tensor Engine."""

from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor

LSE_FLAG = "return_softmax_lse"


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    from mate.mha_interface import flash_attn_varlen_func

    from safelight.attention.flash import flash_attention

    def attend(q: "Tensor", k: "Tensor", v: "Tensor", **options: Any) -> Any:
        # Its kernel takes K to end as many elements after its start as it has, and reads zeros beyond.
        return flash_attn_varlen_func(q, k.contiguous(), v, **options)

    needs_lse = requirements.needs_lse
    # Only where it is needed: not every release has the parameter.
    options = {LSE_FLAG: True} if needs_lse else {}
    # One function for both: without offsets it takes a batch.
    return flash_attention("mate", attend, attend, needs_lse=needs_lse, options=options)


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
