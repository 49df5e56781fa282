"""Masks and empty rows as kernels want them: causal at the bottom right, additive forms, what has nothing to attend to.

Shapes: B batch, S queries, T keys, H heads, D head_dim. For use inside a backend's `load`: this file imports torch.
"""

from itertools import pairwise

import torch
from torch import Tensor

from safelight.attention.backend import Layout


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys each query sees, bool [queries, keys], aligned at the bottom right: the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def full_mask(mask: Tensor | None, *, causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """A mask of any kind and causal as one, [B or 1, H or 1, S or 1, T]: bool, or additive where the mask is.

    None if neither hides anything.
    """
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    if not causal:
        return mask
    visible = causal_mask(queries, keys, device)
    if mask is None:
        return visible[None, None]
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in its additive form: 0 where it is True, -inf where it is False; an additive one in another dtype."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def is_empty(mask: Tensor) -> Tensor:
    """Which rows of a mask [..., T] have nothing to attend to, bool [..., 1]."""
    return ~mask.any(-1, keepdim=True) if mask.dtype == torch.bool else mask.amax(-1, keepdim=True) == -torch.inf


def num_blind(queries: int, keys: int, *, causal: bool) -> int:
    """How many queries, counted from the first, see no key at all where there is no mask."""
    return queries if keys == 0 else max(0, queries - keys) if causal else 0


def clear_blind(out_BSHD: Tensor, lse_BHS: Tensor | None, keys: int, *, causal: bool) -> None:
    """Set the rows that see no key to zeros and -inf, in place, whatever the kernel has left there.

    For fresh results of a kernel without a mask: which rows these are is known without looking at the device.
    """
    blind = num_blind(out_BSHD.shape[1], keys, causal=causal)
    if blind:
        out_BSHD[:, :blind] = 0
        if lse_BHS is not None:
            lse_BHS[:, :, :blind] = -torch.inf


def clear_blind_packed(out_BSHD: Tensor, lse_BHS: Tensor | None, layout: Layout, *, causal: bool) -> None:
    """`clear_blind` for each of the packed documents."""
    documents = zip(pairwise(layout.starts), pairwise(layout.key_starts), strict=True)
    for (start, end), (first, last) in documents:
        lse = None if lse_BHS is None else lse_BHS[:, :, start:end]
        clear_blind(out_BSHD[:, start:end], lse, last - first, causal=causal)


def empty_result(q_BSHD: Tensor, *, with_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """What queries without any key get: zeros, and -inf for their LSE. No kernel need be called for them."""
    out = torch.zeros_like(q_BSHD, memory_format=torch.contiguous_format)
    if not with_lse:
        return out
    batch, queries, heads = q_BSHD.shape[:3]
    return out, torch.full((batch, heads, queries), -torch.inf, dtype=torch.float32, device=q_BSHD.device)


def with_dense_features(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with their last dimension's elements side by side, which most kernels take for granted."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
