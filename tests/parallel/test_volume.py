"""The computed bytes are those that the links count, to the byte, on every rank of many grids."""

import dataclasses
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from safelight.attention.grid import Grid, SharedSequence
from safelight.attention.volume import call_volume, gather_bytes, ring_bytes, ulysses_bytes
from safelight.distributed.mesh import Mesh
from tests.parallel.cells import MASKS, ROLES, Cell, on_rank
from tests.parallel.threads import links, on_ranks

GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (1, 5), (3, 1), (2, 3), (3, 2), (2, 4)]


def computed(cell):
    """Ulysses' and the ring's bytes of each rank, and the most."""
    sizes = {"batch": cell.batch, "tokens": cell.tokens, "itemsize": getattr(torch, cell.dtype).itemsize}
    text = cell.text if cell.is_joint else 0
    need, grid = cell.requirements, cell.grid
    sequence = SharedSequence(rows=cell.batch, tokens=cell.tokens, text=cell.text, channels=1)
    return (
        ulysses_bytes(need, grid, **sizes, text=text),
        ring_bytes(need, grid, **sizes),
        call_volume(need, grid, sequence).total_bytes,
    )


def counted(cell):
    """What the links of a real call count."""
    ends = links(cell.ulysses, cell.ring)
    on_ranks(len(ends), lambda rank: on_rank(cell, *ends[rank]))
    by_ulysses = tuple(ulysses.sent_bytes for ulysses, _ in ends)
    by_ring = tuple(ring.sent_bytes for _, ring in ends)
    return by_ulysses, by_ring, max(u + r for u, r in zip(by_ulysses, by_ring, strict=True))


@pytest.mark.parametrize(("grid", "role", "mask"), list(product(GRIDS, ROLES, MASKS)))
def test_bytes_are_what_the_links_count(grid, role, mask) -> None:
    for tokens, kv_heads, batch, dtype in ((24, 12, 1, "float32"), (29, 12, 3, "bfloat16"), (31, 24, 2, "float32")):
        cell = Cell(
            ulysses=grid[0],
            ring=grid[1],
            role=role,
            mask=mask,
            tokens=tokens,
            heads=24,
            kv_heads=kv_heads,
            batch=batch,
            dtype=dtype,
        )
        assert computed(cell) == counted(cell)
        assert any(computed(cell)[0]) == (grid[0] > 1 and role != "cross")
        assert any(computed(cell)[1]) == (grid[1] > 1 and role != "cross")


@given(
    grid=st.sampled_from(GRIDS),
    role=st.sampled_from(ROLES),
    more=st.integers(0, 40),
    text=st.integers(1, 60),
    groups=st.sampled_from([1, 2, 3]),
    batch=st.integers(1, 3),
)
def test_bytes_of_any_sizes_are_what_the_links_count(grid, role, more, text, groups, batch) -> None:
    ulysses, ring = grid
    cell = Cell(
        ulysses=ulysses,
        ring=ring,
        role=role,
        mask="no mask",
        tokens=ulysses * ring + more,
        text=text,
        heads=2 * ulysses * groups,
        kv_heads=2 * ulysses,
        batch=batch,
    )
    assert computed(cell) == counted(cell)


def test_bytes_of_an_uneven_ring_by_hand() -> None:
    # Blocks of 3, 2 and 2 tokens; a token's key and value are 2 * 8 heads * 16 * 4 bytes. The rank before the long
    # block never sends it.
    cell = Cell(ulysses=1, ring=3, role="self", mask="no mask", tokens=7)
    assert computed(cell) == ((0, 0, 0), (5 * 1024, 5 * 1024, 4 * 1024), 5 * 1024)


def test_bytes_of_ulysses_by_hand() -> None:
    # 3 and 2 tokens, 5 of text, 4 of 8 heads each, 64 bytes a head: 12 heads of its own tokens, 4 of the others' and
    # of the text.
    cell = Cell(ulysses=2, ring=1, role="joint, text first", mask="no mask", tokens=5)
    first, second = (3 * 12 + (2 + 5) * 4) * 64, (2 * 12 + (3 + 5) * 4) * 64
    assert computed(cell) == ((first, second), (0, 0), first)


@pytest.mark.parametrize("change", [{"is_auxiliary": True}, {"replicated_keys": True}])
def test_layers_that_every_rank_runs_alike_send_nothing(change) -> None:
    cell = Cell(ulysses=2, ring=2, role="self", mask="no mask", tokens=9)
    need = dataclasses.replace(cell.requirements, **change)
    sizes = {"batch": 1, "tokens": 9, "itemsize": 4}
    assert ulysses_bytes(need, cell.grid, **sizes) == ring_bytes(need, cell.grid, **sizes) == (0, 0, 0, 0)
    assert call_volume(need, cell.grid, SharedSequence(rows=1, tokens=9, channels=1)).total_bytes == 0


@pytest.mark.parametrize("tokens", [24, 29])
@pytest.mark.parametrize(("ulysses", "ring", "cfg"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 5, 1), (2, 2, 2)])
def test_bytes_of_a_gathered_output_are_what_the_mesh_gathers(ulysses, ring, cfg, tokens, monkeypatch) -> None:
    grid = Grid(ulysses=ulysses, ring=ring, cfg=cfg)
    sent = []
    all_gather = dist.all_gather

    def counting(parts, padded, group):
        sent.append(padded.nbytes * (len(parts) - 1))
        return all_gather(parts, padded, group=group)

    monkeypatch.setattr(dist, "all_gather", counting)
    for rank in (0, grid.num_shards - 1):
        # One rank of many, the others of which say nothing: what this one gives is all that's asked.
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.num_ranks)
        try:
            mesh = Mesh.over_all_ranks(grid)
            mesh.whole(mesh.own(torch.zeros(3, tokens, 7, dtype=torch.bfloat16)), tokens)
        finally:
            dist.destroy_process_group()
    expected = gather_bytes(grid, batch=3, tokens=tokens, channels=7, itemsize=2)
    assert sent == ([expected] * 2 if grid.num_shards > 1 else [])
    assert (expected == 0) == (grid.num_shards == 1)
