"""What a vendor's kernel computes, by the reference, in the forms that vendors' functions take and give.

Shapes: B batch, S queries, T keys, H heads, K key/value heads, D head_dim; packed tokens are the first dimension.
"""

from itertools import pairwise

import torch
from torch import Tensor

from safelight.attention.reference import reference_attention


def attend(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    empty_lse: float = -torch.inf,
) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, D] in q's dtype, LSE float32 [B, H, S]), LSE `empty_lse` in rows that see nothing."""
    out, lse = reference_attention(q_BSHD, k_BTKD, v_BTKD, scale=scale, causal=causal, mask=mask)
    return out.to(q_BSHD.dtype), lse.float().masked_fill(lse == -torch.inf, empty_lse)


def attend_packed(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    *,
    scale: float,
    causal: bool = False,
    empty_lse: float = -torch.inf,
) -> tuple[Tensor, Tensor]:
    """(out [tokens, H, D] in q's dtype, LSE float32 [H, tokens]) of documents packed one after another."""
    out, lse = torch.zeros_like(q_THD), torch.zeros(q_THD.shape[1], q_THD.shape[0])
    documents = zip(pairwise(offsets.tolist()), pairwise(key_offsets.tolist()), strict=True)
    for (start, end), (first, last) in documents:
        part = (q_THD[None, start:end], k_TKD[None, first:last], v_TKD[None, first:last])
        document_out, document_lse = attend(*part, scale=scale, causal=causal, empty_lse=empty_lse)
        out[start:end], lse[:, start:end] = document_out[0], document_lse[0]
    return out, lse


def refuse_unless(is_right: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    """Raise what the vendor raises, with a message of its kind."""
    if not is_right:
        raise error(message)
