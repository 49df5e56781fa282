"""How many bytes a rank sends to others under sequence parallelism: computed from shapes, without torch or a run.

These count what `attention/parallel.py` and the gathering of a model's output hand to a link for another rank, in
bytes; what a library adds (headers, copies on the way, an all-gather by a tree) isn't in it. What a rank keeps for
itself isn't counted.

Symbols: B batch, H query heads, K key and value heads, D head_dim, U and R the grid's `ulysses` and `ring`, n a rank's
own tokens, T tokens that every rank has (text in joint attention). Ranks are those that share a sequence, U * R of
them in the order of `Grid`; where guidance branches are split too, each branch's ranks send this much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from safelight.attention.grid import Grid, SharedSequence, is_sharded, shard_lengths
from safelight.attention.requirements import AttentionRequirements

if TYPE_CHECKING:
    from safelight.attention.plan import LayerGroup

_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def ulysses_bytes(
    need: AttentionRequirements, grid: Grid, *, batch: int, tokens: int, text: int = 0, itemsize: int
) -> tuple[int, ...]:
    """The bytes that each rank sends in the two exchanges of Ulysses, in one call of a layer.

    `need` is what the layer asks for in one process, of a model that `check_grid` accepts. `tokens` are those that the
    ranks share, `text` those that every rank has besides, `itemsize` the bytes of an element. To each of the U - 1
    others of its group, a rank sends that one's heads of its own n tokens, then its own heads of the other's m tokens
    and of the text: B D itemsize (n (H + 2 K) / U + (m + T) H / U). A layer that isn't sharded sends nothing.

    The exchanges are those of Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509, who put the even case with
    K = H and no text at 4 N h / P elements a link (N tokens in all, h = H D, P = U); here a rank's own part, which
    stays, is left out.
    """
    size = grid.ulysses
    if not is_sharded(need):
        return (0,) * grid.num_shards
    heads, kv_heads = need.num_heads // size, need.num_kv_heads // size
    element = batch * need.head_dim * itemsize
    shards = shard_lengths(tokens, grid.num_shards)
    sent = []
    for rank, own in enumerate(shards):
        first = rank - rank % size
        others = sum(shards[first : first + size]) - own
        there = (size - 1) * own * (heads + 2 * kv_heads)
        back = (others + (size - 1) * text) * heads
        sent.append((there + back) * element)
    return tuple(sent)


def ring_bytes(need: AttentionRequirements, grid: Grid, *, batch: int, tokens: int, itemsize: int) -> tuple[int, ...]:
    """The bytes that each rank sends round the ring, in one call of a layer.

    The arguments are those of `ulysses_bytes`; text doesn't go round. A block is the tokens of a Ulysses group. A rank
    sends its own block and then each one that has reached it, but not the last, which is that of the rank after it:
    2 B D itemsize K / U times the tokens of all other blocks. A causal layer sends as much: blocks that a rank's
    queries don't see go round all the same. A layer that isn't sharded sends nothing.

    The ring is that of Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv 2310.01889.
    """
    if not is_sharded(need):
        return (0,) * grid.num_shards
    shards = shard_lengths(tokens, grid.num_shards)
    blocks = [sum(shards[first : first + grid.ulysses]) for first in range(0, grid.num_shards, grid.ulysses)]
    token = 2 * batch * (need.num_kv_heads // grid.ulysses) * need.head_dim * itemsize
    sent = [(tokens - blocks[(place + 1) % grid.ring]) * token for place in range(grid.ring)]
    return tuple(sent[rank // grid.ulysses] for rank in range(grid.num_shards))


def gather_bytes(grid: Grid, *, batch: int, tokens: int, channels: int, itemsize: int) -> int:
    """The bytes that each rank sends when a model's output [batch, tokens, channels] is gathered; the same for all.

    A rank's slice is padded to the longest, and counted once for each other rank, whichever way the library takes it.
    """
    longest = max(shard_lengths(tokens, grid.num_shards))
    return (grid.num_shards - 1) * batch * longest * channels * itemsize


# A whole step


@dataclass(frozen=True, kw_only=True)
class CallVolume:
    """The bytes that one rank sends, at most, in one call of a kind of layer, of which a step makes `count`.

    With uneven slices the rank that sends the most by Ulysses needn't be the one that does round the ring:
    `total_bytes` are the most that any one sends by both, which Fang and Zhao 2024, "USP", arXiv 2405.07719, combine
    like this.
    """

    role: str
    count: int
    ulysses_bytes: int
    ring_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepVolume:
    """What a step of a component costs each rank of a grid, in bytes sent at most.

    `tokens` are those of each rank of a branch, in their order, in `rows` each; `text` are those that all of them have
    besides. `output_bytes` are once a step for gathering the output, and `branch_bytes` for giving it to the other
    branch.
    """

    component: str
    rows: int
    tokens: tuple[int, ...]
    text: int
    calls: tuple[CallVolume, ...]
    output_bytes: int
    branch_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that one rank sends in a step, at most."""
        return sum(call.count * call.total_bytes for call in self.calls) + self.output_bytes + self.branch_bytes

    def to_json(self) -> dict[str, Any]:
        """The volume as plain data."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def call_volume(need: AttentionRequirements, grid: Grid, sequence: SharedSequence, *, count: int = 1) -> CallVolume:
    """The volume of `count` layers that ask for `need` in one process, on a grid that `check_grid` accepts."""
    rows, tokens, itemsize = _own_rows(sequence, grid), sequence.tokens, _ITEMSIZES[need.dtype]
    text = sequence.text if need.role == "joint" else 0
    by_ulysses = ulysses_bytes(need, grid, batch=rows, tokens=tokens, text=text, itemsize=itemsize)
    by_ring = ring_bytes(need, grid, batch=rows, tokens=tokens, itemsize=itemsize)
    total = max(u + r for u, r in zip(by_ulysses, by_ring, strict=True))
    return CallVolume(
        role=need.role, count=count, ulysses_bytes=max(by_ulysses), ring_bytes=max(by_ring), total_bytes=total
    )


def step_volumes(
    groups: "Sequence[LayerGroup]", grid: Grid, sequences: Mapping[str, SharedSequence]
) -> tuple[StepVolume, ...]:
    """The volume of each component that runs on all ranks, on a grid that `check_grid` accepts.

    `groups` are the layers as in one process. A component's output has its layers' dtype; the other guidance branch's
    is float32.
    """
    found = []
    for component, sequence in sequences.items():
        rows, tokens, channels = _own_rows(sequence, grid), sequence.tokens, sequence.channels
        own = [group for group in groups if group.requirements.component == component]
        itemsize = _ITEMSIZES[own[0].requirements.dtype]
        found.append(
            StepVolume(
                component=component,
                rows=rows,
                tokens=shard_lengths(tokens, grid.num_shards),
                text=sequence.text,
                calls=tuple(call_volume(group.requirements, grid, sequence, count=group.count) for group in own),
                output_bytes=gather_bytes(grid, batch=rows, tokens=tokens, channels=channels, itemsize=itemsize),
                branch_bytes=(grid.cfg - 1) * rows * tokens * channels * _ITEMSIZES["float32"],
            )
        )
    return tuple(found)


def _own_rows(sequence: SharedSequence, grid: Grid) -> int:
    """The rows of one rank: each half of the ranks has those of its guidance branch."""
    return sequence.rows // grid.cfg
