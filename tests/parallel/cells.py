"""Cells of parallel attention: a layer, its inputs, a grid; and what one process makes of them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from safelight.attention import AttentionRequirements, Layout, declared_backends
from safelight.attention.grid import Grid, shard_lengths
from safelight.attention.parallel import Link, over_ranks

ROLES = ("self", "cross", "joint, text first", "joint, text last")
MASKS = ("no mask", "key padding", "causal")
GRIDS = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1))
HEAD_DIM = 16


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case: `tokens` are split over the grid, `text` tokens are on every rank (for cross: the keys)."""

    ulysses: int
    ring: int
    role: str
    mask: str
    tokens: int
    text: int = 5
    heads: int = 8
    kv_heads: int = 8
    batch: int = 1
    dtype: str = "float32"

    @property
    def grid(self) -> Grid:
        return Grid(ulysses=self.ulysses, ring=self.ring)

    @property
    def name(self) -> str:
        heads = f"{self.heads} heads on {self.kv_heads}"
        sizes = f"{self.tokens} tokens, text {self.text}, {heads}, batch {self.batch}"
        return f"{self.ulysses}x{self.ring}, {self.role}, {self.mask}, {sizes}"

    @property
    def requirements(self) -> AttentionRequirements:
        role = self.role.partition(",")[0]
        return AttentionRequirements(
            head_dim=HEAD_DIM,
            dtype=self.dtype,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            role=role,  # type: ignore[arg-type]
            causal="causal" in self.mask,
            mask="key_padding" if "key padding" in self.mask else "none",
            equal_lengths=role != "cross",
            replicated_keys=role == "cross",
        )

    @property
    def is_first(self) -> bool:
        return self.role != "joint, text last"

    @property
    def is_joint(self) -> bool:
        return self.role.startswith("joint")

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v of the whole sequence, and the mask of its keys."""
        generator = torch.Generator().manual_seed(len(self.name))
        length = self.tokens + self.text * self.is_joint
        keys = self.text if self.role == "cross" else length

        def draw(tokens: int, heads: int) -> Tensor:
            return torch.randn(self.batch, tokens, heads, HEAD_DIM, generator=generator).to(getattr(torch, self.dtype))

        q, k, v = draw(length, self.heads), draw(keys, self.kv_heads), draw(keys, self.kv_heads)
        mask = None
        if "key padding" in self.mask:
            # Each row hides others, and one of them so many at the end that a rank may have none left.
            mask = torch.rand(self.batch, keys, generator=generator) < 0.7
            mask[:, keys // 2 :] &= torch.arange(self.batch)[:, None] > 0
            mask[:, 0] = True
        return q, k, v, mask


def grid_cells() -> list[Cell]:
    """The whole product."""
    return [
        Cell(ulysses=u, ring=r, role=role, mask=mask, tokens=tokens, heads=8, kv_heads=kv_heads, batch=batch)
        for (u, r), role, mask, tokens, kv_heads, batch in product(GRIDS, ROLES, MASKS, (24, 29), (8, 4), (1, 3))
    ]


def attention(cell: Cell, ulysses: Link, ring: Link, *, make: Callable[..., Any] = over_ranks) -> Any:
    """The cell's kernel on a rank."""
    kernel = declared_backends()["sdpa"].load
    assert kernel is not None
    return make(kernel(cell.grid.local(cell.requirements)), cell.requirements, ulysses, ring)


def on_rank(cell: Cell, ulysses: Link, ring: Link, *, make: Callable[..., Any] = over_ranks) -> Tensor:
    """The output on one rank: of its slice, with the text where the sequence has it."""
    q, k, v, mask = cell.inputs()
    own = ring.rank * ulysses.size + ulysses.rank
    shards = shard_lengths(cell.tokens, cell.grid.num_shards)
    text = None
    if cell.is_joint:
        text = (0, cell.text) if cell.is_first else (cell.tokens, cell.tokens + cell.text)
    layout = Layout(text=text, shards=shards)
    if cell.role == "cross":
        q = sliced(q, cell, own)
    else:
        q, k, v = (sliced(x, cell, own) for x in (q, k, v))
    kernel = attention(cell, ulysses, ring, make=make)
    out: Tensor = kernel(q, k, v, causal=cell.requirements.causal, mask=mask, layout=layout)
    return out


def sliced(x: Tensor, cell: Cell, rank: int) -> Tensor:
    """What a rank has of a whole sequence: its tokens, and all of the text."""
    shards = shard_lengths(cell.tokens, cell.grid.num_shards)
    text = cell.text if cell.is_joint else 0
    start = sum(shards[:rank])
    if cell.is_first:
        return torch.cat((x[:, :text], x[:, text + start : text + start + shards[rank]]), dim=1)
    return torch.cat((x[:, start : start + shards[rank]], x[:, cell.tokens :]), dim=1)


def of_one_process(cell: Cell) -> Tensor:
    """The output of the whole sequence, by the same kernel on one rank."""
    q, k, v, mask = cell.inputs()
    kernel = declared_backends()["sdpa"].load
    assert kernel is not None
    need = cell.requirements
    out: Tensor = kernel(need)(q, k, v, causal=need.causal, mask=mask)
    return out


def error(cell: Cell, rank: int, out: Tensor) -> float:
    """How far a rank's output is from one process's, at most; infinite where it has another shape."""
    truth = sliced(of_one_process(cell), cell, rank)
    if out.shape != truth.shape or out.dtype != truth.dtype:
        return float("inf")
    difference = (out.double() - truth.double()).abs().amax()
    return float(difference.nan_to_num(nan=float("inf")))
