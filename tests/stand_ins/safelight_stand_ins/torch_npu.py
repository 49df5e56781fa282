"""torch_npu's two fused attentions: scale 1 unless told, masks that say what to leave out, shapes of their own."""

from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend, attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

INFERENCE = "torch_npu:npu_fused_infer_attention_score"
FUSION = "torch_npu:npu_fusion_attention"
EMPTY = 12345.0  # in rows that see nothing, whose results aren't defined


def _check(query: Tensor, key: Tensor, value: Tensor, dtypes: tuple[torch.dtype, ...], head_dim: int) -> None:
    for tensor in (query, key, value):
        refuse_unless(tensor.dtype in dtypes, f"EZ1001: dtype {tensor.dtype} isn't supported")
        refuse_unless(tensor.is_contiguous(), "EZ1001: inputs must be contiguous")
        refuse_unless(tensor.shape[-1] <= head_dim, f"EZ1001: head_dim {tensor.shape[-1]} is too large")


def _visible(atten_mask: Tensor | None, sparse_mode: int, shape: tuple[int, int, int]) -> tuple[Tensor | None, bool]:
    """The mask in the reference's sense, and whether the call is causal at the bottom right."""
    if sparse_mode == 3:
        edge = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        refuse_unless(atten_mask is not None and torch.equal(atten_mask, edge), "EZ1001: sparse_mode 3 needs its mask")
        return None, True
    refuse_unless(sparse_mode == 0, "this stand-in knows the modes 0 and 3")
    if atten_mask is None:
        return None, False
    batch, queries, keys = shape
    refuse_unless(atten_mask.dtype == torch.bool and atten_mask.is_contiguous(), "EZ1001: a contiguous bool mask")
    allowed = ((batch, 1, queries, keys), (1, 1, queries, keys), (queries, keys))
    refuse_unless(atten_mask.shape in allowed, f"EZ1001: the mask has the shape {list(atten_mask.shape)}")
    mask = ~atten_mask
    return mask if mask.ndim == 4 else mask[None, None], False


def inference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    num_heads: int,
    num_key_value_heads: int,
    scale: float,
    input_layout: str,
    sparse_mode: int,
    inner_precise: int,
    softmax_lse_flag: bool,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, (torch.float16, torch.bfloat16), 512)
    refuse_unless(query.shape[-1] % 16 == 0, "EZ1001: head_dim must be a multiple of 16")
    refuse_unless(query.shape[-2] == num_heads, f"EZ1001: num_heads is {num_heads}, the query has {query.shape[-2]}")
    refuse_unless(key.shape[-2] == (num_key_value_heads or num_heads), "EZ1001: num_key_value_heads is wrong")
    refuse_unless(atten_mask is None or inner_precise in (2, 3), "EZ1001: rows without keys need inner_precise 2 or 3")
    if input_layout == "TND":
        lists = (actual_seq_lengths, actual_seq_lengths_kv)
        refuse_unless(all(isinstance(one, list) for one in lists), "EZ1001: TND needs lists of lengths")
        refuse_unless(actual_seq_lengths[-1:] == [query.shape[0]], "EZ1001: lengths are cumulative, up to T")
        refuse_unless(actual_seq_lengths_kv[-1:] == [key.shape[0]], "EZ1001: lengths are cumulative, up to T")
        _, causal = _visible(atten_mask, sparse_mode, (1, 0, 0))
        offsets = [torch.tensor([0, *one], dtype=torch.int32) for one in lists]
        out, lse = attend_packed(query, key, value, *offsets, scale=scale, causal=causal, empty_lse=EMPTY)
        return out, lse.T[..., None].contiguous() if softmax_lse_flag else lse.new_zeros(1)
    refuse_unless(input_layout == "BSND", "this stand-in knows BSND and TND")
    mask, causal = _visible(atten_mask, sparse_mode, (query.shape[0], query.shape[1], key.shape[1]))
    out, lse = attend(query, key, value, scale=scale, causal=causal, mask=mask, empty_lse=EMPTY)
    return out, lse[..., None] if softmax_lse_flag else lse.new_zeros(1)


def fusion(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: Tensor | None,
    scale: float,
) -> tuple[Any, ...]:
    _check(query, key, value, (torch.float16, torch.bfloat16, torch.float32), 768)
    refuse_unless(input_layout == "BSND", "this stand-in knows BSND")
    refuse_unless(query.shape[-2] == head_num, f"EZ1001: head_num is {head_num}, the query has {query.shape[-2]}")
    mask, causal = _visible(atten_mask, 0, (query.shape[0], query.shape[1], key.shape[1]))
    out, lse = attend(query, key, value, scale=scale, causal=causal, mask=mask, empty_lse=EMPTY)
    # The sum is taken against the largest score; any split of the LSE is as good as another here.
    highest = lse - 1
    total = torch.full_like(lse, torch.e)
    return out, *(x[..., None].expand(-1, -1, -1, 8) for x in (highest, total)), out.new_empty(0), 0, 0, 0


def modules(recorder: Recorder) -> dict[str, dict[str, Any]]:
    functions = {
        "npu_fused_infer_attention_score": recorder.function(INFERENCE, inference),
        "npu_fusion_attention": recorder.function(FUSION, fusion),
    }
    return {"torch_npu": functions}


STAND_INS = tuple(
    StandIn(
        name="torch-npu 2.14.0",
        backend=backend,
        machine="ascend910b",
        modules=modules,
        packages={
            "torch_npu": PackageFacts(
                dist="torch-npu", version="2.14.0", parameters=tuple(signature_of(INFERENCE).parameters)
            )
        },
    )
    for backend in ("ascend", "ascend_fusion")
)
