"""Timing of attention kernels: each on the same inputs, against the rate of the device's own matrix products."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from safelight.attention.backend import AttentionBackend
from safelight.attention.ranking import Shape, Timing
from safelight.catalog import BROKEN, cause_of

# A run lasts at least this long, of as many calls as that takes: a clock and a device's queue tell nothing of one call.
RUN_S = 0.005
MOST_CALLS = 200
# Where nobody says how many: what fits into a second, within these bounds.
FEWEST_RUNS, MOST_RUNS, ALL_RUNS_S = 3, 20, 1.0
# The matrix product that stands for the peak doubles its edge until it takes this long.
PRODUCT_S = 0.02
SMALLEST_EDGE, LARGEST_EDGE = 512, 8192


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A backend that raised instead of computing, and the first line of the cause."""

    backend: str
    cause: str

    def to_json(self) -> dict[str, Any]:
        """The failure as plain data."""
        return {"backend": self.backend, "cause": self.cause}


def time_backend(
    backend: AttentionBackend,
    shape: Shape,
    device: str,
    *,
    num_runs: int | None = None,
    peak_flops_per_s: float | None = None,
) -> Timing | Failure:
    """Time calls of one backend: the median run, each waited for, after calls that aren't counted.

    `num_runs` None is what fits into a second, at least 3. What the backend raises is a Failure, running out of memory
    too.
    """
    assert backend.load is not None, f"{backend.name} has no adapter"
    try:
        with torch.inference_mode():
            kernel = backend.load(shape.requirements())
            inputs = _inputs(shape, device)
            mask = _mask(shape, device)
            times_s = _times_s(lambda: kernel(*inputs, causal=shape.causal, mask=mask), device, num_runs)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Failure(backend=backend.name, cause=f"out of memory ({cause_of(error)})")
    except BROKEN as error:
        return Failure(backend=backend.name, cause=cause_of(error))
    median_s = statistics.median(times_s)
    flops_per_s = shape.flops / median_s
    return Timing(
        backend=backend.name,
        median_s=median_s,
        num_runs=len(times_s),
        flops_per_s=flops_per_s,
        share_of_peak=None if peak_flops_per_s is None else flops_per_s / peak_flops_per_s,
    )


def matmul_peak(dtype: str, device: str) -> float | None:
    """The rate of a large square matrix product, FLOP/s: the best of several. None where it can't be computed.

    It is what the device reaches in practice, not what its data sheet says.
    """
    edge, best, best_s = SMALLEST_EDGE, 0.0, 0.0
    try:
        while best_s < PRODUCT_S and edge <= LARGEST_EDGE:
            a, b = (torch.randn(edge, edge, device=device).to(getattr(torch, dtype)) for _ in range(2))
            best_s = min(_times_s(partial(torch.mm, a, b), device, 5))
            best = max(best, 2 * edge**3 / best_s)
            edge *= 2
    except BROKEN:
        # It says how good a time is, and the order doesn't depend on it.
        return best or None
    return best


def _times_s(call: Callable[[], object], device: str, num_runs: int | None) -> list[float]:
    """The seconds that a call takes, for each run."""
    call()  # it may compile or choose a kernel
    started_s = _now_s(device)
    call()
    once_s = _now_s(device) - started_s
    num_calls = max(1, min(MOST_CALLS, math.ceil(RUN_S / max(once_s, 1e-9))))
    if num_runs is None:
        num_runs = max(FEWEST_RUNS, min(MOST_RUNS, int(ALL_RUNS_S / max(once_s * num_calls, 1e-9))))
    times_s = []
    for _ in range(num_runs):
        started_s = _now_s(device)
        for _ in range(num_calls):
            call()
        times_s.append((_now_s(device) - started_s) / num_calls)
    return times_s


def _now_s(device: str) -> float:
    """The time when everything that was given to the device is done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))
    return time.perf_counter()


def _inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, as a model's projections give them: [batch, seq, heads, head_dim]."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(seq: int, heads: int) -> Tensor:
        size = (shape.batch, seq, heads, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=getattr(torch, shape.dtype))

    queries, keys = (shape.queries, shape.num_heads), (shape.keys, shape.num_kv_heads)
    return drawn(*queries), drawn(*keys), drawn(*keys)


def _mask(shape: Shape, device: str) -> Tensor | None:
    """A mask of the shape's kind that leaves out the last eighth of the keys; None for no mask."""
    if shape.mask == "none":
        return None
    visible_T = torch.arange(shape.keys, device=device) < shape.keys - shape.keys // 8
    if shape.mask == "key_padding":
        return visible_T.expand(shape.batch, -1).contiguous()
    visible_BHST = visible_T.expand(shape.batch, shape.num_heads, shape.queries, -1)
    if shape.mask == "dense":
        return visible_BHST.contiguous()
    bias_BHST = torch.zeros(visible_BHST.shape, device=device, dtype=getattr(torch, shape.dtype))
    return bias_BHST.masked_fill_(~visible_BHST, -torch.inf)
