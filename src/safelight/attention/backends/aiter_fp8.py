"""aiter_fp8: AMD's AI Tensor Engine with queries, keys and values in 8-bit floating point."""

from typing import TYPE_CHECKING

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements; it quantises what it is given, per tensor."""
    import inspect

    import torch
    from aiter import dtypes, flash_attn_fp8_pertensor_func

    from safelight.attention.masks import clear_blind, with_dense_features

    # The vendor's name for the format of this GPU: the gfx942 has one of its own.
    fp8 = dtypes.fp8
    largest = torch.finfo(fp8).max
    # Releases on the package index know no scales of the inputs; later ones want them.
    has_descales = "q_descale" in inspect.signature(flash_attn_fp8_pertensor_func).parameters

    def size(x: "Tensor") -> "Tensor":
        return x.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)

    def quantised(x: "Tensor", factor: "Tensor") -> "Tensor":
        return (x.float() * factor).clamp(-largest, largest).to(fp8)

    def aiter_fp8(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> "Tensor":
        assert mask is None and (layout is None or layout.offsets is None), "it takes neither mask nor packed documents"
        if q.shape[1] == 0 or k.shape[1] == 0:
            return torch.zeros_like(q, memory_format=torch.contiguous_format)
        q, k, v = with_dense_features(q, k, v)
        dtype, keys = q.dtype, k.shape[1]
        options = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale}
        q_size, k_size, v_size = size(q), size(k), size(v)
        v_fp8 = quantised(v, largest / v_size)
        if has_descales:
            descales = {
                "q_descale": (q_size / largest).reshape(1),
                "k_descale": (k_size / largest).reshape(1),
                "v_descale": (v_size / largest).reshape(1),
            }
            q_fp8, k_fp8 = quantised(q, largest / q_size), quantised(k, largest / k_size)
            out: Tensor = flash_attn_fp8_pertensor_func(q_fp8, k_fp8, v_fp8, **descales, **options).to(dtype)
        else:
            # The scale of scores is a number there, which a scale on the device can't go into. So queries and keys get
            # the same size by opposite factors, which leaves the scores as they are; the values' goes to the output.
            factor = (k_size / q_size).sqrt()
            q_fp8, k_fp8 = quantised(q, factor), quantised(k, 1 / factor)
            out = (flash_attn_fp8_pertensor_func(q_fp8, k_fp8, v_fp8, **options) * (v_size / largest)).to(dtype)
        clear_blind(out, None, keys, causal=causal)
        return out

    return aiter_fp8


def takes(head_dim: int) -> bool:
    """128, which it has on every GPU that it is for."""
    return head_dim == 128


BACKEND = AttentionBackend(
    name="aiter_fp8",
    summary="AMD's AI Tensor Engine for ROCm (amd-aiter) in 8-bit floating point, lossy",
    load=load,
    aliases=("aiter_fp8_pertensor", "rocm_aiter_fp8"),
    platforms=frozenset({"rocm"}),
    arches={"rocm": ("gfx942", "gfx950")},
    # The same package as aiter's, word for word.
    package=Package(
        key="amd_aiter",
        dists=("amd-aiter", "aiter"),
        remedy="pip install amd-aiter, or build AMD's aiter from its sources",
        owns="aiter/ops/mha.py",
        module="aiter",
        function="flash_attn_func",
        min_version="0.1.5",
    ),
    head_dims=takes,
    head_dims_text="128",
    # Neither packed documents nor LSE: its function for the first differs more between releases, and none returns the
    # second.
    is_lossy=True,
)
