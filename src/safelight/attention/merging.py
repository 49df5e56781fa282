"""Merging attention over two sets of keys by their log-sum-exp, as in ring attention.

The rule is that of Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", arXiv 1805.02867.
"""

import torch
from torch import Tensor


def merge_attention(
    out_BSHD: Tensor, lse_BHS: Tensor, other_BSHD: Tensor, other_lse_BHS: Tensor
) -> tuple[Tensor, Tensor]:
    """The attention over both sets of keys: out in float32, or wider where the inputs are, and its LSE.

    LSEs are natural logarithms, -inf where a row has nothing to attend to; two such rows give zeros and -inf, never
    NaN.
    """
    wide = torch.promote_types(out_BSHD.dtype, torch.float32)
    lse = torch.logaddexp(lse_BHS, other_lse_BHS)
    base = lse.masked_fill(lse == -torch.inf, 0)
    first = torch.exp(lse_BHS - base).transpose(1, 2)[..., None].to(wide)
    second = torch.exp(other_lse_BHS - base).transpose(1, 2)[..., None].to(wide)
    return first * out_BSHD + second * other_BSHD, lse
