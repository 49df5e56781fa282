"""Timing: what counts as a run, which rate that is, and that what can't be timed is an answer and no end."""

import dataclasses
import itertools

import pytest
import torch

from safelight.attention import AttentionBackend, declared_backends, timing
from safelight.attention.ranking import Shape, Timing
from safelight.attention.timing import Failure, matmul_peak, time_backend

SDPA = declared_backends()["sdpa"]
SHAPE = Shape(batch=1, queries=16, keys=24, num_heads=4, num_kv_heads=2, head_dim=8, dtype="float32")


@pytest.fixture
def clock(monkeypatch):
    """A clock that each call of the kernel moves on by `call_s`, and nothing else does."""

    class Clock:
        now_s = 0.0
        call_s = 0.01
        calls = 0

        def tick(self, out):
            self.calls += 1
            self.now_s += self.call_s
            return out

    made = Clock()
    monkeypatch.setattr(timing, "_now_s", lambda device: made.now_s)
    return made


def ticking(clock, attend=None):
    """A backend whose kernel takes as long as the clock says."""

    def load(need):
        kernel = SDPA.load(need) if attend is None else attend
        return lambda *args, **options: clock.tick(kernel(*args, **options))

    return dataclasses.replace(SDPA, load=load)


@pytest.mark.parametrize(
    ("call_s", "num_runs", "num_calls"),
    [(0.5, 3, 1), (0.1, 10, 1), (0.01, 20, 1), (0.001, 20, 5), (1e-6, 20, 200)],
)
def test_a_run_has_as_many_calls_as_it_takes_and_there_are_a_second_of_them(clock, call_s, num_runs, num_calls) -> None:
    clock.call_s = call_s
    found = time_backend(ticking(clock), SHAPE, "cpu", peak_flops_per_s=2 * SHAPE.flops / call_s)
    assert isinstance(found, Timing)
    assert found.num_runs == num_runs
    assert clock.calls == 2 + num_runs * num_calls, "two that don't count come first"
    assert found.median_s == pytest.approx(call_s)
    assert found.flops_per_s == pytest.approx(SHAPE.flops / call_s)
    assert found.share_of_peak == pytest.approx(0.5)


def test_as_many_runs_as_were_asked_for_and_the_median_of_them(clock) -> None:
    times = itertools.chain([9.0, 1.0], [1.0, 2.0, 50.0])

    def attend(*args, **options):
        clock.call_s = next(times)

    found = time_backend(ticking(clock, attend), SHAPE, "cpu", num_runs=3)
    assert isinstance(found, Timing)
    assert (found.num_runs, found.median_s, found.share_of_peak) == (3, 2.0, None)


@pytest.mark.parametrize("mask", ["none", "key_padding", "dense", "bias"])
def test_the_kernel_is_given_the_shape_and_its_kind_of_mask(clock, mask) -> None:
    given = {}

    def attend(q, k, v, **options):
        given.update(q=q, k=k, v=v, **options)

    shape = dataclasses.replace(SHAPE, mask=mask, causal=True, batch=2, dtype="bfloat16")
    assert isinstance(time_backend(ticking(clock, attend), shape, "cpu", num_runs=1), Timing)
    assert given["q"].shape == (2, 16, 4, 8) and given["k"].shape == given["v"].shape == (2, 24, 2, 8)
    assert given["q"].dtype == torch.bfloat16 and given["causal"]
    shapes = {"none": None, "key_padding": (2, 24), "dense": (2, 4, 16, 24), "bias": (2, 4, 16, 24)}
    if shapes[mask] is None:
        assert given["mask"] is None
        return
    assert given["mask"].shape == shapes[mask]
    hidden = ~given["mask"] if mask != "bias" else given["mask"] == -torch.inf
    assert hidden[..., -3:].all() and not hidden[..., :-3].any(), "the last eighth of the keys is left out"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("no kernel image\nfor this device"), "RuntimeError: no kernel image"),
        (
            torch.OutOfMemoryError("tried to allocate 9 GiB"),
            "out of memory (OutOfMemoryError: tried to allocate 9 GiB)",
        ),
        (MemoryError(), "out of memory (MemoryError)"),
        (ImportError("libacme.so"), "ImportError: libacme.so"),
    ],
)
def test_what_a_kernel_raises_is_the_answer(error, cause) -> None:
    def load(need):
        raise error

    broken: AttentionBackend = dataclasses.replace(SDPA, name="broken", load=load)
    assert time_backend(broken, SHAPE, "cpu") == Failure(backend="broken", cause=cause)


def test_the_peak_is_the_best_product_and_grows_until_it_takes_long_enough(clock, monkeypatch) -> None:
    edges = []

    def product(a, b):
        edges.append(a.shape[0])
        # The second edge is the most efficient one; the third is long enough.
        return clock.tick(setattr(clock, "call_s", {512: 0.004, 1024: 0.01, 2048: 0.2}[a.shape[0]]))

    monkeypatch.setattr(torch, "mm", product)
    assert matmul_peak("float32", "cpu") == pytest.approx(2 * 1024**3 / 0.01)
    assert list(dict.fromkeys(edges)) == [512, 1024, 2048]


def test_where_products_cannot_be_computed_there_is_no_peak(monkeypatch) -> None:
    def product(a, b):
        raise RuntimeError("not implemented for this dtype")

    monkeypatch.setattr(torch, "mm", product)
    assert matmul_peak("float32", "cpu") is None
