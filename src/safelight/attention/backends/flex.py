"""flex: torch's FlexAttention, compiled for the masks of a layer."""

from safelight.attention.backend import AttentionBackend


def takes(head_dim: int) -> bool:
    """16 to 256: below it the compiled kernel has no tiles, above it they don't fit."""
    return 16 <= head_dim <= 256


BACKEND = AttentionBackend(
    name="flex",
    summary="torch's FlexAttention, compiled at the first call",
    load=None,
    aliases=("flex_attn", "flex_attention"),
    # Not cpu: compiling there needs a C++ compiler, which the facts don't tell of, and not compiled it is no kernel but
    # the whole matrix of scores. Not mps, npu and musa: torch doesn't compile it for them.
    platforms=frozenset({"cuda", "rocm", "xpu"}),
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")},
    dtypes=frozenset({"float16", "bfloat16", "float32"}),
    head_dims=takes,
    head_dims_text="16 to 256",
    # Each is a function of positions that reads the mask's tensor; packed documents and causal are others.
    masks=frozenset({"none", "key_padding", "dense", "bias"}),
    packed_varlen=True,
    lse=True,
)
