"""Mesh: this rank's place in the grid, and its links to the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from safelight.attention.grid import FORMULA, Grid, shard_lengths
from safelight.config import Launch
from safelight.distributed.links import GroupLink, watched
from safelight.errors import RequestError
from safelight.platforms import platform_named, probe_machine

# A rank that waits longer than this for another takes it for lost. One that dies is noticed at once.
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank of a parallel run.

    `world` links all ranks; `sequence` those that share a branch's tokens, in their order; `ulysses` and `ring` are the
    two ways through it; `branches` links the ranks that hold the same tokens of both guidance branches.
    """

    grid: Grid
    world: GroupLink
    sequence: GroupLink
    ulysses: GroupLink
    ring: GroupLink
    branches: GroupLink

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decodes, writes and speaks."""
        return self.world.rank == 0

    def shards(self, num_tokens: int) -> tuple[int, ...]:
        """How many of a sequence's tokens each rank of a branch holds."""
        return shard_lengths(num_tokens, self.grid.num_shards)

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's slice of a sequence, a view."""
        shards = self.shards(x.shape[dim])
        return x.narrow(dim, sum(shards[: self.sequence.rank]), shards[self.sequence.rank])

    def whole(self, x: Tensor, num_tokens: int, dim: int = 1) -> Tensor:
        """The whole sequence, of which every rank of the branch gives its slice."""
        if self.grid.num_shards == 1:
            return x
        return self.sequence.gather(x, self.shards(num_tokens), dim)

    @classmethod
    def over_all_ranks(cls, grid: Grid, *, timeout_s: float = TIMEOUT_S) -> Self:
        """The mesh of a process group that is there already. Every rank makes it at the same time.

        Raises RequestError where the group hasn't as many ranks as the grid.
        """
        num_ranks = dist.get_world_size()
        if num_ranks != grid.num_ranks:
            raise RequestError(
                f"{grid} is a grid of {grid.num_ranks} ranks ({FORMULA}), {num_ranks} were started",
                grid=grid.to_json(),
                num_ranks=num_ranks,
            )
        u, r, c = grid.ulysses, grid.ring, grid.cfg
        ranks = [[[(i * r + j) * u + k for k in range(u)] for j in range(r)] for i in range(c)]  # [cfg, ring, ulysses]
        return cls(
            grid=grid,
            world=_link([list(range(num_ranks))], timeout_s),
            sequence=_link([[rank for row in branch for rank in row] for branch in ranks], timeout_s),
            ulysses=_link([row for branch in ranks for row in branch], timeout_s),
            ring=_link([[row[k] for row in branch] for branch in ranks for k in range(u)], timeout_s),
            branches=_link([[branch[j][k] for branch in ranks] for j in range(r) for k in range(u)], timeout_s),
        )


@contextmanager
def joined_mesh(
    grid: Grid, launch: Launch, *, collectives: str = "gloo", timeout_s: float = TIMEOUT_S
) -> Iterator[Mesh]:
    """The mesh of the ranks that a launcher started with this one; they part at the end.

    `collectives` is what torch calls the library, "gloo" or "cpu:gloo,cuda:nccl". Raises RankError where not all ranks
    come within `timeout_s`.
    """
    how = None if launch.meeting is None else f"file://{launch.meeting}"
    with watched():
        dist.init_process_group(
            collectives,
            init_method=how,
            rank=launch.rank,
            world_size=launch.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    try:
        yield Mesh.over_all_ranks(grid, timeout_s=timeout_s)
    finally:
        dist.destroy_process_group()


def rank_device(asked: str | None, local_rank: int) -> tuple[str, str]:
    """The device of a rank on this machine, as `probe_machine` takes it, and what ranks on such exchange with.

    `asked` is a platform's name, None the best there is. Each rank has the device of its own number, but ranks on a
    CPU share it. Raises RequestError where the platform isn't here, or has no device of this number.
    """
    facts = probe_machine(asked)
    platform = platform_named(facts.platform)
    if platform.torch_device == "cpu":
        return facts.platform, platform.collectives
    device = f"{facts.platform}:{local_rank}"
    probe_machine(device)
    torch.accelerator.set_device_index(local_rank)
    return device, platform.collectives


def _link(groups: list[list[int]], timeout_s: float) -> GroupLink:
    """This rank's among the groups; every rank makes all of them, in the same order."""
    with watched():
        made = [dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)) for ranks in groups]
    own = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
    group = made[own]
    assert isinstance(group, dist.ProcessGroup), "a group that this rank is in"
    return GroupLink(group)
