"""cudnn: cuDNN's fused attention, through the operator that torch has for it."""

from safelight.attention.backend import AttentionBackend


def takes(head_dim: int) -> bool:
    """Multiples of 8 up to 128: more than that depends on the cuDNN version, which isn't among the facts."""
    return head_dim % 8 == 0 and head_dim <= 128


BACKEND = AttentionBackend(
    name="cudnn",
    summary="cuDNN's fused attention, as torch calls it",
    load=None,
    aliases=("cudnn_attn", "cudnn_attention", "_native_cudnn"),
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")},
    head_dims=takes,
    head_dims_text="multiples of 8 up to 128",
    # Its bias is additive and per head, so every mask fits in; causal with unequal lengths becomes one as well.
    masks=frozenset({"none", "key_padding", "dense", "bias"}),
    lse=True,
)
