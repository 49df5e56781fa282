"""laser: MindIE's Laser Attention for Ascend, made for the self-attention of long sequences."""

from safelight.attention.backend import AttentionBackend
from safelight.platforms.packages import Package


def takes(head_dim: int) -> bool:
    """Up to 128, to which it is padded."""
    return head_dim <= 128


BACKEND = AttentionBackend(
    name="laser",
    summary="MindIE's Laser Attention (mindiesd), for self-attention",
    load=None,
    aliases=("laser_attn", "laser_attention", "ascend_laser_attention"),
    platforms=frozenset({"npu"}),
    arches={"npu": ("ascend910b", "ascend910c")},
    package=Package(
        key="mindiesd",
        dists=("mindiesd",),
        remedy="install MindIE SD (mindiesd) in the release made for the installed torch and torch-npu",
        needs=("torch_npu",),
        # Not mindiesd.attention_forward: on the Ascend 950 and below 2048 tokens that calls another kernel unasked.
        module="mindiesd.layers._custom_ops",
        function="laser_attention",
    ),
    head_dims=takes,
    head_dims_text="up to 128",
    grouped_query=False,
    causal=False,
    cross_lengths=False,
    self_only=True,
    # It computes in float16, whatever it is given.
    is_lossy=True,
)
