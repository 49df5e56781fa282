"""cuDNN's operator in torch: heads first, top-left causal, wrong for strided inputs, LSE with a dimension more."""

from typing import Any

import torch
from torch import Tensor

from safelight_stand_ins.maths import attend, refuse_unless
from safelight_stand_ins.recorded import Recorder
from safelight_stand_ins.stand_in import StandIn

NAME = "_scaled_dot_product_cudnn_attention"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    is_causal: bool,
    scale: float | None,
) -> Any:
    for tensor in (query, key, value):
        refuse_unless(tensor.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
        refuse_unless(tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= 128, "head_dim must be a multiple of 8")
        refuse_unless(tensor.shape[1] == query.shape[1], "heads have to be equally many")
    # It takes strides for what they would be side by side in memory.
    q, k, v = (x if x.is_contiguous() else x.flatten().roll(1).view(x.shape) for x in (query, key, value))
    queries, keys = q.shape[2], k.shape[2]
    mask = attn_bias
    if attn_bias is not None:
        refuse_unless(attn_bias.dtype == q.dtype, "the bias must have the dtype of the query")
        refuse_unless(attn_bias.shape == (*q.shape[:3], keys), "the bias must be expanded")
    if is_causal:
        refuse_unless(attn_bias is None, "causal and a bias exclude each other")
        mask = torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale, mask=mask, empty_lse=torch.nan)
    out = out.masked_fill(lse.isnan().transpose(1, 2)[..., None], torch.nan).transpose(1, 2).contiguous()
    lse = lse[..., None] if compute_log_sumexp else lse.new_zeros(0)
    none = query.new_empty(0)
    return out, lse, none, none, queries, keys, none, none, none


def operators(recorder: Recorder) -> dict[str, Any]:
    return {NAME: recorder.function(f"torch:aten.{NAME}.default", attention)}


STAND_INS = (
    StandIn(
        name="cuDNN in torch 2.13",
        backend="cudnn",
        machine="b200",
        modules=lambda recorder: {},
        packages={},
        operators=operators,
    ),
)
