"""Parallel attention between threads: every cell of the grid, odd sizes, tokens counted once, faults that must show."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.cells import GRIDS, MASKS, ROLES, Cell, error, grid_cells, on_rank
from tests.parallel.threads import links, on_ranks

TOLERANCE = 1e-5


def worst(cell, make=None):
    ends = links(cell.ulysses, cell.ring)
    how = {} if make is None else {"make": make}
    outs = on_ranks(len(ends), lambda rank: on_rank(cell, *ends[rank], **how))
    return max(error(cell, rank, out) for rank, out in enumerate(outs))


@pytest.mark.parametrize("cell", grid_cells(), ids=lambda cell: cell.name)
def test_every_cell_equals_one_process(cell) -> None:
    assert worst(cell) < TOLERANCE


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("role", ROLES)
def test_key_padding_and_causal_together_equal_one_process(grid, role) -> None:
    cell = Cell(ulysses=grid[0], ring=grid[1], role=role, mask="key padding, causal", tokens=29, batch=3)
    assert worst(cell) < TOLERANCE


@given(
    grid=st.sampled_from([*GRIDS, (1, 1), (1, 3), (3, 1), (2, 3), (1, 5)]),
    role=st.sampled_from(ROLES),
    mask=st.sampled_from(MASKS),
    more=st.integers(0, 40),
    text=st.integers(1, 60),
    heads=st.sampled_from([(6, 6), (6, 3), (12, 6), (12, 12)]),
    batch=st.integers(1, 3),
)
def test_any_sizes_equal_one_process(grid, role, mask, more, text, heads, batch) -> None:
    ulysses, ring = grid
    if heads[1] % ulysses:
        heads = (heads[0] * ulysses, heads[1] * ulysses)
    cell = Cell(
        ulysses=ulysses,
        ring=ring,
        role=role,
        mask=mask,
        tokens=ulysses * ring + more,
        text=text,
        heads=heads[0],
        kv_heads=heads[1],
        batch=batch,
    )
    assert worst(cell) < TOLERANCE


@pytest.mark.parametrize("role", ROLES)
def test_half_types_are_merged_in_float32(role) -> None:
    cell = Cell(ulysses=2, ring=2, role=role, mask="no mask", tokens=41, dtype="bfloat16")
    assert worst(cell) < 2**-6


@pytest.mark.parametrize("text", [1, 5, 30])
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("role", ["joint, text first", "joint, text last"])
def test_dx_013_text_that_every_rank_has_counts_once(grid, role, text) -> None:
    cell = Cell(ulysses=grid[0], ring=grid[1], role=role, mask="no mask", tokens=12, text=text, heads=4, kv_heads=4)
    assert worst(cell) < TOLERANCE


class OneLoudText(Cell):
    """Every score is the same, and one text token alone has a value."""

    def inputs(self):
        q, k, v, mask = super().inputs()
        v = torch.zeros_like(v)
        v[:, 1 if self.is_first else self.tokens + 1] = 1e3
        return torch.zeros_like(q), k, v, mask


@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.parametrize("mask", ["no mask", "causal"])
@pytest.mark.parametrize("role", ["joint, text first", "joint, text last"])
def test_dx_050_a_joint_token_is_attended_to_once_from_everywhere(ring, mask, role) -> None:
    cell = OneLoudText(ulysses=1, ring=ring, role=role, mask=mask, tokens=8, text=3, heads=4, kv_heads=4)
    ends = links(1, ring)
    for rank, out in enumerate(on_ranks(ring, lambda rank: on_rank(cell, *ends[rank]))):
        assert error(cell, rank, out) < 1e-3  # of 1000
        if mask == "no mask":
            torch.testing.assert_close(out, torch.full_like(out, 1e3 / 11))


# What is changed in the functions' source, and a cell that shows it.
FAULTS = {
    "text goes round with the ring and counts twice": (
        "sent = torch.stack((k[:, here], v[:, here]))",
        "blocks = tuple(n + text for n in blocks)\n        sent = torch.stack((k, v))",
        ("joint, text first", "no mask"),
    ),
    "text isn't attended to": (
        "attend_to(k, v, slice(None), block, causal=causal, layout=inner)",
        "attend_to(k[:, here], v[:, here], slice(None), block, causal=causal, layout=inner)",
        ("joint, text last", "no mask"),
    ),
    "padding isn't masked": (
        "            columns = None\n            if mask is not None:",
        "            columns = None\n            if False:",
        ("self", "key padding"),
    ),
    "padding is that of another block": (
        "columns = mask[:, starts[block] : starts[block] + blocks[block]]",
        "columns = mask[:, starts[rank] : starts[rank] + blocks[block]]",
        ("self", "key padding"),
    ),
    "a rank attends to its own block alone": (
        "for turn in range(size):",
        "for turn in range(1):",
        ("self", "no mask"),
    ),
    "the LSE is taken for one in base 2": (
        "result: tuple[Tensor, Tensor] = kernel(q[:, rows], keys, values, scale=scale, mask=columns, **how)",
        "result = (lambda out, lse: (out, lse * 1.4427))(*kernel(q[:, rows], keys, values, mask=columns, **how))",
        ("self", "no mask"),
    ),
    "causal is left out between blocks": ("if not causal:", "if True:", ("self", "causal")),
    "heads come back in the order of ranks' tokens": (
        "received.view(size, -1, batch, heads, head_dim).permute(2, 1, 0, 3, 4)",
        "received.view(-1, size, batch, heads, head_dim).permute(2, 0, 1, 3, 4)",
        ("self", "no mask"),
    ),
    "every rank takes the first heads of the text": (
        "[:, :, link.rank] for x in (q, k, v)]",
        "[:, :, 0] for x in (q, k, v)]",
        ("joint, text first", "no mask"),
    ),
    "every slice of the queries is taken for the first": (
        "causal_slice(kernel, ring_link.rank * ulysses_link.size + ulysses_link.rank)",
        "causal_slice(kernel, 0)",
        ("cross", "causal"),
    ),
    "text after the sequence is taken for text before it": (
        "return layout.shards, end - start, start == 0",
        "return layout.shards, end - start, True",
        ("joint, text last", "causal"),
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_shows(what) -> None:
    old, new, (role, mask) = FAULTS[what]
    original = sys.modules["safelight.attention.parallel"]
    source = Path(original.__file__).read_text()
    assert source.count(old) == 1, "the source has changed: plant the fault anew"
    module = ModuleType(f"faulty {original.__name__}")
    exec(compile(source.replace(old, new), f"{original.__file__} ({what})", "exec"), module.__dict__)
    cell = Cell(ulysses=2, ring=2, role=role, mask=mask, tokens=28, batch=3)
    assert worst(cell) < TOLERANCE
    assert worst(cell, module.over_ranks) > 100 * TOLERANCE
