"""How the ranks of a parallel run share the work: Ulysses by heads, ring by tokens, halves by guidance branch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from safelight.attention.requirements import AttentionRequirements
from safelight.errors import RequestError

FORMULA = "cfg_parallel x ring x ulysses"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How many ways heads (`ulysses`), tokens (`ring`) and guidance branches (`cfg`, 1 or 2) are split.

    Ranks are numbered with ulysses fastest, then ring, then cfg, so that the ranks of a Ulysses group are neighbours.
    Each of the `ulysses * ring` ranks of a branch holds a slice of the tokens, in the order of its number.
    """

    ulysses: int = 1
    ring: int = 1
    cfg: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}; it must be a whole number of at least 1"
            for name, value in (("ulysses", self.ulysses), ("ring", self.ring))
            if not (type(value) is int and value >= 1)
        ]
        if not (type(self.cfg) is int and self.cfg in (1, 2)):
            problems.append(f"cfg_parallel is {self.cfg!r}; it must be 1 or 2, since guidance has two branches")
        if problems:
            raise RequestError("; ".join(problems), problems=problems)

    @property
    def num_shards(self) -> int:
        """How many ranks share a sequence."""
        return self.ulysses * self.ring

    @property
    def num_ranks(self) -> int:
        """How many ranks there are in all."""
        return self.num_shards * self.cfg

    def __str__(self) -> str:
        branches = "" if self.cfg == 1 else f"cfg_parallel {self.cfg} x "
        return f"{branches}ulysses {self.ulysses} x ring {self.ring}"

    def local(self, need: AttentionRequirements) -> AttentionRequirements:
        """What a layer asks of the kernel on one rank.

        Ulysses leaves a part of the heads. Ring calls the kernel on one block of keys after another and merges the
        results by their LSE; the blocks may differ by a token from the queries. Layers that every rank runs alike
        (auxiliary ones, and those whose keys every rank has) ask what they ask of one process.
        """
        if not is_sharded(need) or self.num_shards == 1:
            return need
        return need.replace(
            num_heads=need.num_heads // self.ulysses,
            num_kv_heads=need.num_kv_heads // self.ulysses,
            needs_lse=need.needs_lse or self.ring > 1,
            equal_lengths=need.equal_lengths and self.ring == 1,
        )

    def to_json(self) -> dict[str, int]:
        """The grid as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class SharedSequence:
    """What the ranks of a branch share in one pass of a component.

    `tokens` are those that are sharded, in `rows`, one for each guidance branch; `text` are those that every rank has
    besides, in joint attention. `channels` are the numbers that a token gives at the end, which are gathered.
    """

    rows: int
    tokens: int
    text: int = 0
    channels: int


def is_sharded(need: AttentionRequirements) -> bool:
    """Whether a layer's keys are spread over the ranks, so that it needs what the others hold."""
    return not (need.is_auxiliary or need.replicated_keys)


def shard_lengths(num_tokens: int, num_shards: int) -> tuple[int, ...]:
    """How many tokens each rank holds: as even as can be, the longer slices first."""
    short, num_longer = divmod(num_tokens, num_shards)
    return tuple(short + (i < num_longer) for i in range(num_shards))


def check_grid(
    grid: Grid, needs: Iterable[AttentionRequirements], sequences: Mapping[str, SharedSequence] | None = None
) -> None:
    """Raise RequestError where layers can't be split like this, with the grids that would work.

    `sequences` are what a request makes of the components, where that is known.
    """
    split = [need for need in needs if not need.is_auxiliary]
    shared = dict(sequences or {})
    problems = _problems(grid, split, shared)
    if not problems:
        return
    # For fewer ranks, where none of this many works: the most that do. More than two for each token never do.
    most = max((2 * sequence.tokens for sequence in shared.values()), default=grid.num_ranks)
    counts = (grid.num_ranks, *range(min(grid.num_ranks - 1, most), 0, -1))
    of_each = ([other for other in grids_of(count) if not _problems(other, split, shared)] for count in counts)
    fits: list[Grid] = next(filter(None, of_each), [])
    ranks = fits[0].num_ranks if fits else 0
    remedy = (
        f"with {ranks} rank{'s' * (ranks != 1)} these work: {', '.join(map(str, fits))}" if fits else "no grid works"
    )
    raise RequestError(
        f"{grid} doesn't fit this model: {'; '.join(problems)}; {remedy}",
        grid=grid.to_json(),
        problems=problems,
        would_do=[other.to_json() for other in fits],
    )


def grids_of(num_ranks: int) -> list[Grid]:
    """Every grid of so many ranks: without cfg parallel first, which serve any guidance, and more Ulysses first."""
    return [
        Grid(ulysses=ulysses, ring=num_ranks // cfg // ulysses, cfg=cfg)
        for cfg in (1, 2)
        if num_ranks % cfg == 0
        for ulysses in _divisors(num_ranks // cfg)
    ]


def _divisors(number: int) -> list[int]:
    """All of them, the largest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)}, reverse=True)


def _problems(grid: Grid, split: Iterable[AttentionRequirements], sequences: Mapping[str, SharedSequence]) -> list[str]:
    found: dict[str, None] = {}
    for component, sequence in sequences.items():
        if sequence.rows < grid.cfg:
            one = "one guidance branch (a guidance scale above 1 makes two)"
            found[f"{component} runs {one}, which cfg_parallel {grid.cfg} doesn't split"] = None
    for need in split if grid.num_shards > 1 else ():
        layer = f"{need.component}.{need.role}"
        if need.mask in ("dense", "bias"):
            found[f"{layer} has a mask for every query and key ({need.mask}), which isn't split"] = None
        if need.packed_varlen and (grid.ring > 1 or need.replicated_keys):
            how = "are on every rank as a whole" if need.replicated_keys else "aren't split by a ring"
            found[f"{layer} has packed documents, which {how}"] = None
        if not is_sharded(need):
            continue
        if need.needs_lse:
            found[f"{layer} gives its log-sum-exp, which isn't gathered"] = None
        if need.num_heads % grid.ulysses:
            found[f"{layer} has {need.num_heads} heads, which ulysses {grid.ulysses} doesn't divide"] = None
        elif need.num_kv_heads % grid.ulysses:
            heads = f"{need.num_kv_heads} key and value heads"
            found[f"{layer} has {heads}, which ulysses {grid.ulysses} doesn't divide"] = None
        if need.role == "cross":
            found[f"{layer} doesn't say that every rank has its keys"] = None
        sequence_of = sequences.get(need.component)
        if sequence_of is not None and sequence_of.tokens < grid.num_shards:
            few = f"{sequence_of.tokens} token{'s' * (sequence_of.tokens != 1)}"
            found[f"{layer} has {few} for {grid.num_shards} ranks"] = None
    return list(found)
