"""mate: flash attention of Moore Threads' MUSA AI Tensor Engine."""

from safelight.attention.backend import AttentionBackend
from safelight.platforms.packages import Package


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 256."""
    return head_dim % 8 == 0 and head_dim <= 256


BACKEND = AttentionBackend(
    name="mate",
    summary="Moore Threads' MUSA AI Tensor Engine (mate)",
    load=None,
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
    head_dims_text="multiples of 8 up to 256",
    # No LSE: the base of its logarithm hasn't been seen on a device. No key_padding, as with flash2.
    packed_varlen=True,
)
