"""flashinfer: FlashInfer's prefill attention for packed rows, dense or in documents."""

import math
from typing import TYPE_CHECKING, Any

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 * 1024 * 1024  # what its documentation recommends
MOST_PLANS = 8


def load(requirements: AttentionRequirements) -> AttentionFn:
    """The kernel for layers with these requirements. It keeps a plan for each of the last shapes it was called with."""
    import inspect

    import torch
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    from safelight.attention.masks import clear_blind, clear_blind_packed, empty_result, with_dense_features

    needs_lse = requirements.needs_lse
    # Its LSE is in base 2 where that can't be chosen.
    has_base = "lse_base" in inspect.signature(BatchPrefillWithRaggedKVCacheWrapper.run).parameters
    asked = {"return_lse": True, **({"lse_base": "ln"} if has_base else {})} if needs_lse else {}
    workspaces: dict[torch.device, Tensor] = {}
    plans: dict[Any, Any] = {}

    def planned(
        q: "Tensor", k: "Tensor", starts: tuple[int, ...], key_starts: tuple[int, ...], scale: float, causal: bool
    ) -> Any:
        key = (q.device, q.dtype, q.shape[1:], k.shape[1:], starts, key_starts, scale, causal)
        if key not in plans:
            if len(plans) == MOST_PLANS:
                del plans[next(iter(plans))]
            if q.device not in workspaces:
                workspaces[q.device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspaces[q.device], kv_layout="NHD")
            # Offsets in the host's memory: those on the device would be waited for.
            wrapper.plan(
                torch.tensor(starts, dtype=torch.int32),
                torch.tensor(key_starts, dtype=torch.int32),
                num_qo_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_dim_qk=q.shape[2],
                causal=causal,
                sm_scale=scale,
                q_data_type=q.dtype,
                kv_data_type=k.dtype,
            )
            plans[key] = wrapper
        return plans[key]

    def flashinfer(
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        assert mask is None, "flashinfer takes no mask here"
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        if queries == 0 or keys == 0:
            return empty_result(q, with_lse=needs_lse)
        q, k, v = with_dense_features(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        is_packed = layout is not None and layout.offsets is not None
        if layout is not None and is_packed:
            starts, key_starts = layout.starts, layout.key_starts
        else:
            starts = tuple(range(0, batch * queries + 1, queries))
            key_starts = tuple(range(0, batch * keys + 1, keys))
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = planned(q, k, starts, key_starts, scale, causal).run(q, k, v, **asked)
        lse = None
        if needs_lse:
            out, lse = out
            lse = lse if has_base else lse * math.log(2)
            lse = lse.unflatten(0, (batch, queries)).transpose(1, 2).contiguous()
        out = out.unflatten(0, (batch, queries))
        if layout is not None and is_packed:
            clear_blind_packed(out, lse, layout, causal=causal)
        else:
            clear_blind(out, lse, keys, causal=causal)
        return (out, lse) if needs_lse else out

    return flashinfer


def takes(head_dim: int) -> bool:
    """The sizes that all of its kernels take."""
    return head_dim in HEAD_DIMS


BACKEND = AttentionBackend(
    name="flashinfer",
    summary="FlashInfer's prefill attention (flashinfer-python)",
    load=load,
    aliases=("flash_infer", "flashinfer_attn"),
    # Its import compares CUDA versions, which a ROCm build hasn't got.
    platforms=frozenset({"cuda"}),
    arches={"cuda": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")},
    package=Package(
        key="flashinfer",
        dists=("flashinfer-python",),
        remedy="pip install flashinfer-python, with flashinfer-cubin or a CUDA compiler",
        module="flashinfer",
        function="BatchPrefillWithRaggedKVCacheWrapper",
        # The oldest that the declaration was held to.
        min_version="0.2.8",
    ),
    head_dims=takes,
    head_dims_text=", ".join(map(str, HEAD_DIMS)),
    # No masks: its own is one for all heads, of every query with every key.
    packed_varlen=True,
    lse=True,
)
