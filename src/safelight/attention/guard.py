"""The first-use guard (`--check-attention`): what a kernel gives in a run, held to the reference on the same inputs.

Shapes: B batch, S queries, T keys, H heads, D head_dim, R the rows (queries) that are looked at.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout
from safelight.attention.contract import LOSSY_TOLERANCE, LSE_TOLERANCE, problem_of_form
from safelight.attention.plan import AttentionPlan
from safelight.attention.reference import reference_attention
from safelight.attention.requirements import AttentionRequirements
from safelight.errors import KernelMismatchError
from safelight.request import AttentionCheck

# The error of a head (root mean square over its rows and features) against the size of its output. That is the size
# to go by: what rounding the weights and the output does, shrinks with the output where many keys average out, and so
# does what a wrong scale does, while the values' own size doesn't. An exact kernel stays below one rounding of its
# dtype (2^-8 for bfloat16, 2^-11 for float16), and one that rounds its scores too below three; four are allowed. A
# scale that is 5 % off makes 0.05 times the spread of the scores of it. In float32 the scores' sums decide: 1e-6 and
# more where scores are large.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11}
# A single row has no features of others to average with, so its rounding varies more. Among a thousand rows of a head
# it hardly counts, and yet a row that misses a block of its keys is off by a good part of its size.
ROW_FACTOR = 8
LOSSY_ROW_FACTOR = 2
# For each step of the comparison: scores that are held at a time, and rows that are looked at.
SCORE_BYTES = 64 * 2**20
MOST_ROWS = 1024
# The golden ratio's part behind the point: its multiples fall evenly on a length, and on every offset in a block.
GOLDEN = (math.sqrt(5) - 1) / 2

# Packed documents as ranges of queries and of keys; a call that isn't packed is one of them.
Segment = tuple[range, range]


@dataclass(frozen=True)
class _Kind:
    """What has to be checked once: a kernel in layers with equal requirements, called in one form."""

    requirements: AttentionRequirements
    backend: str
    form: tuple[Any, ...]


class Guard:
    """Wraps kernels so that their results are compared with the reference: the first of each kind of layer, or all.

    A kind of layer is checked again where it is called in another form (with a mask, packed) or with another backend.
    A kernel that changes its inputs is compared with what they were. Sparse kernels leave keys out on purpose: they
    aren't compared, which is said once.
    """

    def __init__(self, mode: str, *, score_bytes: int = SCORE_BYTES, most_rows: int = MOST_ROWS) -> None:
        self._mode = mode
        self._score_bytes = score_bytes
        self._most_rows = most_rows
        self._settled: set[_Kind] = set()
        self._checks: dict[tuple[AttentionRequirements, str], AttentionCheck] = {}
        self._log = logging.getLogger("safelight.attention")

    def around(
        self, kernel: AttentionFn, backend: AttentionBackend, requirements: AttentionRequirements, layer: str
    ) -> AttentionFn:
        """The kernel of the layer of that name, checked; it raises KernelMismatchError where it disagrees."""
        if backend.is_sparse:
            self._say_once(backend, requirements)
            return kernel

        def checked(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            scale: float | None = None,
            causal: bool = False,
            mask: Tensor | None = None,
            layout: Layout | None = None,
        ) -> Any:
            is_packed = layout is not None and layout.offsets is not None
            kind = _Kind(
                requirements, backend.name, (None if mask is None else (mask.ndim, mask.dtype), causal, is_packed)
            )
            options: dict[str, Any] = {"scale": scale, "causal": causal, "mask": mask, "layout": layout}
            if self._mode == "first" and kind in self._settled:
                return kernel(q, k, v, **options)
            segments = _segments(q, k, layout)
            rows = _rows(segments, self._num_rows(q, k))
            if not rows:
                return kernel(q, k, v, **options)
            truth = self._reference(q, k, v, rows, segments, scale, causal, mask)
            result = kernel(q, k, v, **options)
            step = layout.step + 1 if layout is not None and layout.step is not None else None
            self._judge(result, truth, rows, q, backend, requirements, layer, step)
            if any(queries and len(keys) > 1 for queries, keys in segments):  # of one key every scale makes the same
                self._settled.add(kind)
            return result

        return checked

    def checks(self, plan: AttentionPlan) -> tuple[AttentionCheck, ...]:
        """What has been checked so far of the kernels in a plan, in its order."""
        keys = [(layer.requirements, layer.selection.backend) for layer in plan.layers]
        return tuple(self._checks[key] for key in keys if key in self._checks)

    def _num_rows(self, q: Tensor, k: Tensor) -> int:
        """How many rows of all heads on one key head have scores that fit."""
        groups = q.shape[2] // k.shape[2]
        return max(1, min(self._most_rows, self._score_bytes // (4 * groups * max(1, k.shape[1]))))

    def _reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Sequence[int],
        segments: Sequence[Segment],
        scale: float | None,
        causal: bool,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The reference's (out [B, R, H, D], lse [B, H, R]) in those rows, over all keys that they may see."""
        groups = q.shape[2] // k.shape[2]
        bytes_per_head = 4 * k.shape[1] * max(groups * len(rows), 2 * groups * k.shape[3]) or 1
        num_heads = max(1, self._score_bytes // bytes_per_head)
        outs, lses = [], []
        for b in range(q.shape[0]):
            heads = []
            for first in range(0, k.shape[2], num_heads):
                kv = slice(first, first + num_heads)
                own = slice(first * groups, (first + num_heads) * groups)
                parts = []
                for queries, keys in segments:
                    inside = [row for row in rows if row in queries]
                    index = torch.tensor(inside, dtype=torch.int64, device=q.device)
                    visible = _visible(mask, b, own, index, queries, keys, causal)
                    where = slice(keys.start, keys.stop)
                    qkv = (q[b : b + 1, index, own], k[b : b + 1, where, kv], v[b : b + 1, where, kv])
                    parts.append(reference_attention(*qkv, scale=scale, mask=visible))
                heads.append((torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)))
            outs.append(torch.cat([out for out, _ in heads], 2))
            lses.append(torch.cat([lse for _, lse in heads], 1))
        return torch.cat(outs), torch.cat(lses)

    def _judge(
        self,
        result: Any,
        truth: tuple[Tensor, Tensor],
        rows: Sequence[int],
        q: Tensor,
        backend: AttentionBackend,
        requirements: AttentionRequirements,
        layer: str,
        step: int | None,
    ) -> None:
        """Compare; keep a check that agrees, raise for one that doesn't."""
        key = (requirements, backend.name)
        where = layer if step is None else f"{layer}, step {step}"
        dtype = str(q.dtype).removeprefix("torch.")
        shape = (*q.shape[:3], truth[0].shape[3])
        problem = problem_of_form(result, shape, dtype, needs_lse=requirements.needs_lse)
        if problem is not None:
            raise _mismatch(
                f"attention backend {backend.name} in {where}: {problem}", backend, requirements, layer, step
            )
        out, lse = result if requirements.needs_lse else (result, None)
        index = torch.tensor(rows, dtype=torch.int64, device=q.device)
        worst = _worst(out[:, index], truth[0], requirements.dtype, is_lossy=backend.is_lossy)
        if lse is not None:
            worst = max(worst, _worst_lse(lse[:, :, index], truth[1], requirements.dtype, is_lossy=backend.is_lossy))
        if not worst.share <= 1:
            b, r, h = worst.at
            shown = "NaN" if math.isnan(worst.error) else f"{worst.error:.3g}"
            raise _mismatch(
                f"attention backend {backend.name} disagrees with the reference in {where}: {worst.what} is off by "
                f"{shown} where {worst.allowed:.3g} is allowed (batch {b}, row {rows[r]}, head {h})",
                backend,
                requirements,
                layer,
                step,
                error=worst.error if math.isfinite(worst.error) else None,
                allowed=worst.allowed,
                batch=b,
                row=rows[r],
                head=h,
            )
        seen = self._checks.get(key)
        check = AttentionCheck(
            component=requirements.component,
            role=requirements.role,
            backend=backend.name,
            layer=layer,
            calls=1 if seen is None else seen.calls + 1,
            error=worst.error,
            allowed=worst.allowed,
        )
        if seen is not None and seen.error / seen.allowed >= worst.share:
            check = seen.replace(calls=check.calls)
        self._checks[key] = check
        if seen is None:
            self._log.info("%s: looked at %d of %d rows", check, len(rows), q.shape[1])

    def _say_once(self, backend: AttentionBackend, requirements: AttentionRequirements) -> None:
        kind = _Kind(requirements, backend.name, ())
        if kind not in self._settled:
            self._settled.add(kind)
            layer = f"{requirements.component}.{requirements.role}"
            self._log.warning(
                "%s: %s is sparse: dense attention is no measure for it, not checked", layer, backend.name
            )


@dataclass(frozen=True)
class _Worst:
    """The place where a result is farthest from the truth, in parts of what is allowed: (batch, R, head)."""

    what: str
    error: float
    allowed: float
    at: tuple[int, int, int]

    @property
    def share(self) -> float:
        return self.error / self.allowed

    def __gt__(self, other: "_Worst") -> bool:
        return math.isnan(self.error) or self.share > other.share


def _worst(out: Tensor, truth: Tensor, dtype: str, *, is_lossy: bool) -> _Worst:
    """The worst head or row. A row whose truth is no finite number is nobody's fault here, and left out."""
    finite = truth.isfinite().all(-1)
    out, truth = (x.masked_fill(~finite[..., None], 0) for x in (out.to(truth.dtype), truth))
    row_error, row_size = (out - truth).norm(dim=-1), truth.norm(dim=-1)  # [B, R, H]
    smallest = torch.finfo(truth.dtype).tiny
    head_size = row_size.square().mean(1, keepdim=True).sqrt()
    head_error = row_error.square().mean(1, keepdim=True).sqrt() / head_size.clamp(min=smallest)
    # A row that comes out small by chance has the rounding of its neighbours.
    row_error = row_error / (row_size.square() + head_size.square()).sqrt().clamp(min=smallest)
    allowed = LOSSY_TOLERANCE if is_lossy else TOLERANCE[dtype]
    factor = LOSSY_ROW_FACTOR if is_lossy else ROW_FACTOR
    b, r, h = _place(row_error)
    row = _Worst("a row", float(row_error[b, r, h]), allowed * factor, (b, r, h))
    b, _, h = _place(head_error)
    head = _Worst("a head", float(head_error[b, 0, h]), allowed, (b, _place(row_error[b : b + 1, :, h : h + 1])[1], h))
    return max(head, row)


def _worst_lse(lse: Tensor, truth: Tensor, dtype: str, *, is_lossy: bool) -> _Worst:
    """The worst LSE of [B, H, R]; a row with nothing to attend to must have -inf. Rounding grows with its size."""
    tolerance = 10 * LSE_TOLERANCE["bfloat16"] if is_lossy else LSE_TOLERANCE[dtype]
    lse, truth = lse.transpose(1, 2), truth.transpose(1, 2)
    error = (lse.to(truth.dtype) - truth).abs() / truth.abs().clamp(min=1)
    error = error.masked_fill((lse == truth) | truth.isnan(), 0)
    error = error.nan_to_num(nan=torch.inf)
    at = _place(error)
    return _Worst("LSE", float(error[at]), tolerance, at)


def _place(error: Tensor) -> tuple[int, int, int]:
    """Where [B, R, H] has its largest number, NaN before any."""
    if not error.numel():
        return (0, 0, 0)
    b, r, h = torch.unravel_index(error.nan_to_num(nan=torch.inf).argmax(), error.shape)
    return int(b), int(r), int(h)


def _segments(q: Tensor, k: Tensor, layout: Layout | None) -> list[Segment]:
    if layout is None or layout.offsets is None:
        return [(range(q.shape[1]), range(k.shape[1]))]
    queries = [range(start, end) for start, end in pairwise(layout.starts)]
    return list(zip(queries, (range(start, end) for start, end in pairwise(layout.key_starts)), strict=True))


def _rows(segments: Sequence[Segment], most: int) -> list[int]:
    """Up to so many rows, in order: the ends of the documents first, then others from all over."""
    length = segments[-1][0].stop
    if length <= most:
        return list(range(length))
    ends = [row for queries, _ in segments if queries for row in (queries[-1], queries[0])]
    spread = (int(i * GOLDEN % 1 * length) for i in range(1, most))
    return sorted(list(dict.fromkeys([*ends[: max(1, most // 2)], *spread]))[:most])


def _visible(
    mask: Tensor | None, b: int, heads: slice, index: Tensor, queries: range, keys: range, causal: bool
) -> Tensor | None:
    """What the rows see in their segment, as the reference takes it: its part of the mask, and causal with it."""
    part = mask
    if mask is not None and mask.ndim == 2:
        part = mask[b : b + 1, None, None, keys.start : keys.stop]
    elif mask is not None:
        part = mask[b : b + 1] if mask.shape[0] > 1 else mask
        part = part[:, heads] if mask.shape[1] > 1 else part
        part = part[:, :, index] if mask.shape[2] > 1 else part
        part = part[..., keys.start : keys.stop] if mask.shape[3] > 1 else part
    if not causal:
        return part
    last_key = index - queries.start + len(keys) - len(queries)  # causal is aligned at the bottom right
    visible = torch.arange(len(keys), device=index.device) <= last_key[:, None]
    if part is None:
        return visible[None, None]
    return part & visible if part.dtype == torch.bool else part.masked_fill(~visible, -torch.inf)


def _mismatch(
    what: str,
    backend: AttentionBackend,
    requirements: AttentionRequirements,
    layer: str,
    step: int | None,
    **numbers: Any,
) -> KernelMismatchError:
    name = f"{requirements.component}.{requirements.role}"
    other = "another backend" if backend.name == "sdpa" else "sdpa"
    choice = f"--attention {name}={'NAME' if backend.name == 'sdpa' else 'sdpa'}"
    return KernelMismatchError(
        f"{what}. Take {other} there with {choice}; `safelight doctor --verify --backend {backend.name}` tells which "
        f"cases it gets wrong",
        component=requirements.component,
        role=requirements.role,
        layer=layer,
        step=step,
        backend=backend.name,
        **numbers,
    )
