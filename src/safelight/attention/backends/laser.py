"""laser: MindIE's Laser Attention for Ascend, made for the self-attention of long sequences."""

from typing import TYPE_CHECKING

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor

# It works on whole blocks of tokens, and on one head_dim.
BLOCK = 256
HEAD_DIM = 128
# What it is told where no key is padding.
NO_PADDING = 2**31 - 1


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements."""
    import torch
    from mindiesd.layers._custom_ops import laser_attention
    from torch.nn.functional import pad

    def padded(x: "Tensor") -> "Tensor":
        """Heads first, float16, in whole blocks [batch, heads, seq, HEAD_DIM]."""
        batch, length, heads, head_dim = x.shape
        shape = (batch, heads, length + -length % BLOCK, HEAD_DIM)
        if (length, head_dim) == (shape[2], HEAD_DIM):
            return x.transpose(1, 2).to(torch.float16, memory_format=torch.contiguous_format)
        return pad(x.transpose(1, 2).to(torch.float16), (0, HEAD_DIM - head_dim, 0, -length % BLOCK)).contiguous()

    def laser(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> "Tensor":
        assert mask is None and not causal, "laser takes neither mask nor causal"
        assert layout is None or layout.offsets is None, "laser takes no packed documents"
        queries, head_dim = q.shape[1], q.shape[3]
        if queries == 0 or k.shape[1] == 0:
            return torch.zeros_like(q, memory_format=torch.contiguous_format)
        out: Tensor
        _, out = laser_attention(
            padded(q),
            padded(k),
            padded(v),
            scale_value=head_dim**-0.5 if scale is None else scale,
            head_num=q.shape[2],
            input_layout="BNSD",
            # So many keys at the end get the score -60,000. Its name is from causal windows, of which this is none.
            pre_tokens=-k.shape[1] % BLOCK or NO_PADDING,
        )
        out = out[:, :, :queries, :head_dim].transpose(1, 2)
        return out.to(q.dtype)

    return laser


def takes(head_dim: int) -> bool:
    """Up to 128, to which it is padded."""
    return head_dim <= HEAD_DIM


BACKEND = AttentionBackend(
    name="laser",
    summary="MindIE's Laser Attention (mindiesd), for self-attention, computed in float16",
    load=load,
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
    # It is given a mask by nobody, its own package included; a padded end is all that it is told of.
    causal=False,
    cross_lengths=False,
    self_only=True,
    # It computes in float16, whatever it is given.
    is_lossy=True,
)
