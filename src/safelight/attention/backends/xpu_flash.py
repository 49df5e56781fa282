"""xpu_flash: flash attention for Intel's GPUs, from vLLM's kernels for them."""

from safelight.attention.backend import AttentionBackend
from safelight.platforms.packages import Package

HEAD_DIMS = (64, 96, 128, 192, 256)


def takes(head_dim: int) -> bool:
    """The sizes it is compiled for."""
    return head_dim in HEAD_DIMS


BACKEND = AttentionBackend(
    name="xpu_flash",
    summary="flash attention for Intel's GPUs (vllm-xpu-kernels)",
    load=None,
    aliases=("xpu_fa", "xpu_attn", "xpu_flash_attn"),
    platforms=frozenset({"xpu"}),
    # Ponte Vecchio and Xe2.
    arches={"xpu": ("xpu-pvc", "xpu-pvc-vg", "xpu-bmg-g21", "xpu-bmg-g31", "xpu-lnl-m")},
    package=Package(
        key="xpu_flash",
        dists=("vllm-xpu-kernels",),
        remedy="pip install vllm-xpu-kernels, in the release made for the installed torch",
        module="vllm_xpu_kernels.flash_attn_interface",
        function="flash_attn_varlen_func",
        flag="FA2_AVAILABLE",
        flag_reason="FA2_UNAVAILABLE_REASON",
    ),
    head_dims=takes,
    head_dims_text=", ".join(map(str, HEAD_DIMS)),
    # No LSE: the base of its logarithm hasn't been seen on a device. No key_padding, as with flash2.
    packed_varlen=True,
)
