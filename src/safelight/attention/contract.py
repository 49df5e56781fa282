"""The contract: one kernel's answer to one case, held to the reference. Imports torch.

Shapes: B batch, S queries, T keys, H heads, K key/value heads, D head_dim.
"""

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from safelight.attention.backend import AttentionFn, Layout
from safelight.attention.cases import Case, Strides
from safelight.attention.merging import merge_attention
from safelight.attention.reference import reference_attention

# The largest error of an exact kernel on standard normal inputs, whose outputs are below about 3: float32 sums in
# another order, bfloat16 and float16 with their 8 and 11 bits; the reference gets the same rounded inputs.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
# A lossy kernel is held to the size of its error against that of the output: 8 bits lose 1 to 5 %, 4 bits up to 20 %;
# what drops a scale or a mask loses more than a third.
LOSSY_TOLERANCE = 0.25
LSE_TOLERANCE = {"float64": 1e-6, "float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


class Inputs(NamedTuple):
    """What a kernel is called with."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    layout: Layout | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How a kernel did on a case: its largest error and the one allowed, the time it took, and what was wrong, if so.

    The error is NaN where there was no result to compare. Of a lossy kernel it is relative (root mean square), else
    absolute.
    """

    case: Case
    error: float
    tolerance: float
    seconds: float
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data; an error that isn't a number is None."""
        return {
            "case": self.case.name,
            "passed": self.problem is None,
            "error": self.error if math.isfinite(self.error) else None,
            "tolerance": self.tolerance,
            "seconds": self.seconds,
            "problem": self.problem,
        }


def judge(kernel: AttentionFn, case: Case, *, device: torch.device | str = "cpu", is_lossy: bool = False) -> Finding:
    """Call the kernel on the case's inputs and compare with the reference. What the kernel raises goes through."""
    given = inputs(case, device)
    before = given._replace(
        q=given.q.clone(), k=given.k.clone(), v=given.v.clone(), mask=None if given.mask is None else given.mask.clone()
    )
    started_s = time.perf_counter()
    got = _halves(kernel, case, given) if case.halves else _call(kernel, case, given)
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started_s
    expected = reference(case, before)
    tolerance = LOSSY_TOLERANCE if is_lossy else TOLERANCE[case.requirements.dtype]
    problem, error = _compare(got, expected, case, tolerance, is_lossy=is_lossy)
    pairs = {"q": (given.q, before.q), "k": (given.k, before.k), "v": (given.v, before.v)}
    changed = [name for name, (now, then) in pairs.items() if not torch.equal(now, then)]
    if given.mask is not None and before.mask is not None and not torch.equal(given.mask, before.mask):
        changed.append("mask")
    if changed and problem is None:
        problem = f"the call changed its input {' and '.join(changed)}"
    return Finding(case=case, error=error, tolerance=tolerance, seconds=seconds, problem=problem)


def inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The case's inputs, the same in every run and on every device."""
    need = case.requirements
    generator = torch.Generator().manual_seed(7)

    def draw(length: int, heads: int) -> Tensor:
        shape = (case.batch, length, heads, need.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(case.queries, need.num_heads), draw(case.keys, need.num_kv_heads), draw(case.keys, need.num_kv_heads)
    if case.opposed:
        q, k = q.abs(), -k.abs() * 32 / math.sqrt(need.head_dim)
    mask = _mask(case, generator)
    if mask is not None and mask.ndim == 2:
        # What is hidden is large, so that a kernel that looks at it shows.
        hidden = ~mask[:, :, None, None]
        k, v = k + 9 * hidden, v - 70 * hidden
    dtype = getattr(torch, need.dtype)
    q, k, v = (_strided(x.to(device, dtype), case.strides) for x in (q, k, v))
    if case.is_shared:
        k, v = k[:1].expand(case.batch, -1, -1, -1), v[:1].expand(case.batch, -1, -1, -1)
    if mask is not None:
        is_wide = mask.dtype == torch.bool or case.mask == "bias in float32"
        # A bias is rounded by the layer, to its own dtype; then it may come in a wider one.
        mask = mask.to(device) if mask.dtype == torch.bool else mask.to(dtype).to(device)
        mask = mask.to(torch.float32) if is_wide and mask.dtype != torch.bool else mask
    layout = None
    if case.documents:
        queries, keys = ([pair[i] for pair in case.documents] for i in (0, 1))
        layout = Layout.of_documents(queries, None if queries == keys else keys, device=device)
    return Inputs(q, k, v, mask, layout)


def reference(case: Case, given: Inputs) -> tuple[Tensor, Tensor]:
    """What the definition gives for the case: (out, lse), float32 or wider."""
    need = case.requirements

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return reference_attention(q, k, v, scale=need.scale, causal=need.causal, mask=given.mask)

    if given.layout is None:
        return attend(given.q, given.k, given.v)
    documents = zip(pairwise(given.layout.starts), pairwise(given.layout.key_starts), strict=True)
    results = [
        attend(given.q[:, start:end], given.k[:, first:last], given.v[:, first:last])
        for (start, end), (first, last) in documents
    ]
    return torch.cat([out for out, _ in results], dim=1), torch.cat([lse for _, lse in results], dim=2)


def _call(kernel: AttentionFn, case: Case, given: Inputs) -> Any:
    need = case.requirements
    return kernel(given.q, given.k, given.v, scale=need.scale, causal=need.causal, mask=given.mask, layout=given.layout)


def _halves(kernel: AttentionFn, case: Case, given: Inputs) -> Any:
    """Both halves of the keys, merged, with the output's dtype restored for the comparison."""
    middle = case.keys // 2
    results = []
    for part in (slice(0, middle), slice(middle, None)):
        mask = given.mask
        if mask is not None and mask.shape[-1] == case.keys:
            mask = mask[..., part]
        results.append(_call(kernel, case, given._replace(k=given.k[:, part], v=given.v[:, part], mask=mask)))
    (first, first_lse), (second, second_lse) = results
    out, lse = merge_attention(first, first_lse, second, second_lse)
    return out.to(given.q.dtype), lse


def problem_of_form(got: Any, shape: tuple[int, ...], dtype: str, *, needs_lse: bool) -> str | None:
    """What is wrong with the form of a kernel's result, whose out should be of this shape and dtype, if anything."""
    is_pair = isinstance(got, tuple) and len(got) == 2 and all(isinstance(part, Tensor) for part in got)
    if is_pair != needs_lse or not (is_pair or isinstance(got, Tensor)):
        return f"it returned {type(got).__name__} for a layer that needs {'out and LSE' if needs_lse else 'out'}"
    out, lse = got if is_pair else (got, None)
    if out.shape != shape or str(out.dtype) != f"torch.{dtype}":
        return f"out is {out.dtype} {list(out.shape)}, it should be {dtype} {list(shape)}"
    if lse is None:
        return None
    batch, queries, heads, _ = shape
    if lse.shape != (batch, heads, queries) or lse.dtype != torch.float32:
        return f"LSE is {lse.dtype} {list(lse.shape)}, it should be float32 {[batch, heads, queries]}"
    return None if lse.is_contiguous() else f"LSE isn't contiguous: strides {lse.stride()}"


def _compare(
    got: Any, expected: tuple[Tensor, Tensor], case: Case, tolerance: float, *, is_lossy: bool
) -> tuple[str | None, float]:
    """What is wrong with a result, if anything, and its largest error."""
    need = case.requirements
    truth, true_lse = expected
    problem = problem_of_form(got, tuple(truth.shape), need.dtype, needs_lse=need.needs_lse)
    if problem is not None:
        return problem, math.nan
    out, lse = got if need.needs_lse else (got, None)
    if out.isnan().any():
        return "out has NaN", math.nan
    empty = (true_lse == -torch.inf).transpose(1, 2)
    if out[empty].any():
        return f"rows with nothing to attend to have values up to {float(out[empty].abs().max()):.3g}", math.nan
    error = _error(out, truth, is_lossy=is_lossy)
    if error > tolerance:
        return f"out is off by {error:.3g}, allowed is {tolerance:.3g}", error
    if lse is None:
        return None, error
    return _compare_lse(lse, true_lse, need.dtype, is_lossy=is_lossy), error


def _compare_lse(lse: Tensor, truth: Tensor, dtype: str, *, is_lossy: bool) -> str | None:
    empty = truth == -torch.inf
    if not torch.equal(lse == -torch.inf, empty):
        wrong = lse[empty].tolist()[:1] or ["-inf in rows that have something to attend to"]
        return f"LSE of rows with nothing to attend to: {wrong[0]}, it should be -inf exactly there"
    error = float((lse.double() - truth.double())[~empty].abs().amax()) if (~empty).any() else 0.0
    allowed = 10 * LSE_TOLERANCE["bfloat16"] if is_lossy else LSE_TOLERANCE[dtype]
    # Not "error > allowed", which NaN would pass.
    return None if error <= allowed else f"LSE is off by {error:.3g}, allowed is {allowed:.3g}"


def _error(out: Tensor, truth: Tensor, *, is_lossy: bool) -> float:
    difference = out.to(truth.dtype) - truth
    if not difference.numel():
        return 0.0
    if not is_lossy:
        return float(difference.abs().amax())
    return float(difference.norm() / truth.norm().clamp(min=1e-6))


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    """A mask of the case's form; no row is empty unless the form says so."""
    form = case.mask
    if not form:
        return None
    batch, heads, queries, keys = case.batch, case.requirements.num_heads, case.queries, case.keys

    def visible(*shape: int) -> Tensor:
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[..., 0] = True
        return mask

    if form.startswith("key padding"):
        counts = torch.tensor([max(1, keys - 3 * row) for row in range(batch)])
        if "empty" in form:
            counts[-1] = 0
        return torch.arange(keys)[None] < counts[:, None]
    shape = {"for all heads": (batch, 1, queries, keys), "for all rows": (1, heads, queries, keys)}
    sizes = next((size for name, size in shape.items() if form.endswith(name)), (batch, heads, queries, keys))
    hidden = torch.zeros(sizes, dtype=torch.bool)
    if "empty" in form:
        hidden[0, -1, queries // 2] = True
        hidden[-1] = True
    if form.startswith("dense"):
        return visible(*sizes) & ~hidden
    if form == "bias of keys":
        return torch.randn(batch, 1, 1, keys, generator=generator) * 2
    bias = torch.randn(sizes, generator=generator) * 2
    if form == "bias with -inf":
        bias = bias.masked_fill(~visible(*sizes), -torch.inf)
    return bias.masked_fill(hidden, -torch.inf)


def _strided(x: Tensor, strides: Strides | None) -> Tensor:
    """The same values in another layout of memory."""
    if strides is None:
        return x
    if strides == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "part of fused projections":
        return torch.stack((x, x + 1, x - 1), dim=2)[:, :, 0]
    if strides == "every other token":
        return x.repeat_interleave(2, dim=1)[:, ::2]
    return x.mT.contiguous().mT
