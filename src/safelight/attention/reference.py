"""The truth every kernel is held to: attention by its definition, in float32 or wider.

Vaswani et al., "Attention Is All You Need" (2017), equation 1, with grouped-query heads, masks and log-sum-exp.
Shapes: B batch, S queries, T keys, H heads, K key/value heads, D head_dim.
"""

import torch
from torch import Tensor


def reference_attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend by definition and return (out [batch, queries, heads, head_dim], lse [batch, heads, queries]).

    `mask` is bool [batch, keys] (key padding), bool [batch, heads, queries, keys] (dense) or the additive float form
    of it; dimensions of one broadcast. Causal is aligned at the bottom right. A row with nothing to attend to gives
    zeros and -inf. Both results are float32 (float64 for float64 inputs), lse in the natural logarithm.
    """
    wide = torch.float64 if q_BSHD.dtype == torch.float64 else torch.float32
    q_BHSD = q_BSHD.transpose(1, 2).to(wide)
    k_BHTD = k_BTKD.transpose(1, 2).to(wide)
    v_BHTD = v_BTKD.transpose(1, 2).to(wide)
    groups = q_BHSD.shape[1] // k_BHTD.shape[1]
    k_BHTD, v_BHTD = k_BHTD.repeat_interleave(groups, dim=1), v_BHTD.repeat_interleave(groups, dim=1)
    scores_BHST = q_BHSD @ k_BHTD.mT * (q_BHSD.shape[-1] ** -0.5 if scale is None else scale)
    queries, keys = scores_BHST.shape[-2:]
    if causal:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=scores_BHST.device).tril(keys - queries)
        scores_BHST = scores_BHST.masked_fill(~visible, -torch.inf)
    if mask is not None:
        mask = mask[:, None, None, :] if mask.ndim == 2 else mask
        if mask.dtype == torch.bool:
            scores_BHST = scores_BHST.masked_fill(~mask, -torch.inf)
        else:
            scores_BHST = scores_BHST + mask.to(wide)
    lse_BHS = torch.logsumexp(scores_BHST, dim=-1)
    weights_BHST = torch.exp(scores_BHST - lse_BHS.masked_fill(lse_BHS == -torch.inf, 0)[..., None])
    return (weights_BHST @ v_BHTD).transpose(1, 2), lse_BHS
