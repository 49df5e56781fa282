"""FlashInfer's wrapper for packed rows: planned with offsets, then run; LSE [tokens, heads], base 2 unless asked."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from safelight.platforms import PackageFacts
from safelight_stand_ins.maths import attend_packed, refuse_unless
from safelight_stand_ins.recorded import Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

WRAPPER = "flashinfer-python:flashinfer.BatchPrefillWithRaggedKVCacheWrapper"


def wrapper_class(recorder: Recorder, with_base: bool) -> type:
    """The class, with methods of the recorded signatures; releases before 0.7 can't be asked for a base."""

    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            def made(float_workspace_buffer: Tensor, kv_layout: str) -> None:
                refuse_unless(float_workspace_buffer.dtype == torch.uint8, "the workspace is of bytes")
                refuse_unless(kv_layout == "NHD", "this stand-in knows NHD alone")

            recorder.function(f"{WRAPPER}.__init__", made)(*args, **kwargs)
            self.plan = recorder.function(f"{WRAPPER}.plan", self._plan)

        def _plan(
            self,
            qo_indptr: Tensor,
            kv_indptr: Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            causal: bool,
            sm_scale: float | None,
            q_data_type: Any,
            kv_data_type: Any,
        ) -> None:
            refuse_unless(head_dim_qk in (64, 128, 256), "Unsupported head_dim", ValueError)
            refuse_unless(num_qo_heads % num_kv_heads == 0, "num_qo_heads must be a multiple", ValueError)
            refuse_unless(qo_indptr.dtype == kv_indptr.dtype == torch.int32, "indptr must be int32")
            self._offsets = (qo_indptr.clone(), kv_indptr.clone())
            self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
            self._dtypes = (q_data_type, kv_data_type)
            self._how = {"causal": causal, "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale}

        def _run(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, lse_base: str) -> Any:
            dtypes = (getattr(torch, self._dtypes[0]) if isinstance(self._dtypes[0], str) else self._dtypes[0], k.dtype)
            refuse_unless((q.dtype, k.dtype) == dtypes, "dtypes aren't those of the plan", ValueError)
            refuse_unless((*q.shape[1:2], *k.shape[1:]) == self._heads, "shapes aren't those of the plan", ValueError)
            refuse_unless(q.shape[0] == int(self._offsets[0][-1]), "not as many tokens as planned", ValueError)
            out, lse_HT = attend_packed(q, k, v, *self._offsets, **self._how)
            lse = lse_HT.T.contiguous() / (1 if lse_base == "ln" else math.log(2))
            return (out, lse) if return_lse else out

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_unless(with_base or "lse_base" not in kwargs, "unexpected keyword argument 'lse_base'", TypeError)
        return recorder.function(f"{WRAPPER}.run", self._run)(*args, **kwargs)

    signature = signature_of(f"{WRAPPER}.run")
    named = [p for p in signature.parameters.values() if with_base or p.name != "lse_base"]
    run.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    BatchPrefillWithRaggedKVCacheWrapper.run = run  # type: ignore[attr-defined]
    return BatchPrefillWithRaggedKVCacheWrapper


def modules(recorder: Recorder, with_base: bool) -> dict[str, dict[str, Any]]:
    made = wrapper_class(recorder, with_base)
    return {"flashinfer": {"BatchPrefillWithRaggedKVCacheWrapper": made}}


STAND_INS = tuple(
    StandIn(
        name=f"flashinfer-python {version}",
        backend="flashinfer",
        machine="h100",
        modules=partial(modules, with_base=with_base),
        packages={"flashinfer": PackageFacts(dist="flashinfer-python", version=version)},
    )
    for version, with_base in (("0.7.4", True), ("0.2.8", False))
)
