"""Packed documents for kernels that know none: one call for each, on slices."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from safelight.attention.backend import Layout


def each_document(
    attend: Callable[[Tensor, Tensor, Tensor], Any], q: Tensor, k: Tensor, v: Tensor, layout: Layout
) -> Any:
    """`attend` on every document of a packed batch of one, joined; it gives out, or (out, lse), and so does this.

    Shapes: q and out [1, total queries, heads, head_dim], k and v [1, total keys, kv_heads, head_dim], lse
    [1, heads, total queries].
    """
    documents = zip(pairwise(layout.starts), pairwise(layout.key_starts), strict=True)
    results = [attend(q[:, start:end], k[:, first:last], v[:, first:last]) for (start, end), (first, last) in documents]
    if isinstance(results[0], Tensor):
        return torch.cat(results, dim=1)
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)
