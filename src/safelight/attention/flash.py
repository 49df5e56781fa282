"""What the adapters of FlashAttention's family have in common. For use inside a backend's `load`: it imports torch."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from safelight.attention.backend import AttentionFn, Layout
from safelight.attention.masks import clear_blind, clear_blind_packed, empty_result, with_dense_features


def flash_attention(
    name: str,
    dense: Callable[..., Any],
    varlen: Callable[..., Any],
    *,
    needs_lse: bool,
    options: Mapping[str, Any] | None = None,
) -> AttentionFn:
    """The callable of a vendor's two functions, which have the parameters of flash-attn's (Dao 2023, arXiv 2307.08691).

    `dense` takes q, k and v [batch, seq, heads, head_dim]; `varlen` takes them as [total, heads, head_dim], with the
    documents' offsets and the longest one's tokens by name. Both are given `softmax_scale`, `causal` and `options`, and
    return out, or a tuple of out and the natural LSE, [batch, heads, seq] or [heads, total], with more behind or None.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Any:
        assert mask is None, f"{name} takes no mask"
        if q.shape[1] == 0 or k.shape[1] == 0:
            return empty_result(q, with_lse=needs_lse)
        q, k, v = with_dense_features(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        asked = {"softmax_scale": scale, "causal": causal, **(options or {})}
        if layout is None or layout.offsets is None:
            out, lse = _both(dense(q, k, v, **asked))
            clear_blind(out, lse, k.shape[1], causal=causal)
        else:
            longest, longest_keys = layout.longest
            # By name: their order differs between vendors.
            result = varlen(
                q[0],
                k[0],
                v[0],
                cu_seqlens_q=layout.offsets,
                cu_seqlens_k=layout.offsets if layout.key_offsets is None else layout.key_offsets,
                max_seqlen_q=longest,
                max_seqlen_k=longest_keys,
                **asked,
            )
            out, lse = _both(result)
            out, lse = out[None], None if lse is None else lse[None]
            clear_blind_packed(out, lse, layout, causal=causal)
        return (out, lse) if needs_lse else out

    return attend


def _both(result: Any) -> tuple[Tensor, Tensor | None]:
    """Out, and the LSE if there is one: some releases always return it, others only what they are asked for."""
    return (result[0], result[1]) if isinstance(result, tuple) else (result, None)
