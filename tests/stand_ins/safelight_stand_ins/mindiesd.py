"""MindIE SD's laser attention: float16 in whole blocks, heads first, keys at the end hidden by their number."""

from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

FUNCTION = "mindiesd:mindiesd.layers._custom_ops.laser_attention"
BLOCK, HEAD_DIM = 256, 128
NO_PADDING = 2**31 - 1


def laser_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    alibi_mask: Tensor | None,
    drop_mask: Tensor | None,
    scale_value: float,
    head_num: int,
    input_layout: str,
    keep_prob: float,
    pre_tokens: int,
    next_tokens: int,
    is_high_precision: bool,
) -> tuple[Tensor, Tensor]:
    for tensor in (query, key, value):
        refuse_unless(tensor.dtype == torch.float16, "EZ1001: only float16 is supported")
        refuse_unless(tensor.is_contiguous(), "EZ1001: inputs must be contiguous")
        refuse_unless(tensor.shape[3] == HEAD_DIM, f"EZ1001: head_dim must be {HEAD_DIM}")
        refuse_unless(tensor.shape[2] % BLOCK == 0, f"EZ1001: lengths must be multiples of {BLOCK}")
        refuse_unless(tensor.shape[1] == head_num, f"EZ1001: head_num is {head_num}, there are {tensor.shape[1]}")
    refuse_unless(input_layout == "BNSD", "this stand-in knows BNSD")
    refuse_unless(atten_mask is None and alibi_mask is None and drop_mask is None, "this stand-in knows no masks")
    refuse_unless(
        (keep_prob, next_tokens, is_high_precision) == (1.0, 1, True), "only what the package itself asks for"
    )
    refuse_unless(pre_tokens == NO_PADDING or 0 < pre_tokens < BLOCK, "EZ1001: pre_tokens is no number of padded keys")
    hidden = 0 if pre_tokens == NO_PADDING else pre_tokens
    heads_last = [x.transpose(1, 2) for x in (query, key, value)]
    mask = torch.zeros(1, 1, 1, key.shape[2])
    mask[..., key.shape[2] - hidden :] = -60000.0
    out, lse = attend(*(x.float() for x in heads_last), scale=scale_value, mask=mask)
    # Rounded as its products are, and given in float32.
    return lse, out.half().float().transpose(1, 2).contiguous()


def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
    return {"mindiesd.layers._custom_ops": {"laser_attention": recorder.function(FUNCTION, laser_attention)}}


STAND_INS = (
    StandIn(
        name="mindiesd 3.1.0",
        backend="laser",
        machine="ascend910b",
        modules=modules,
        packages={
            "mindiesd": PackageFacts(
                dist="mindiesd", version="3.1.0", parameters=tuple(signature_of(FUNCTION).parameters)
            )
        },
    ),
)
