"""A group of ranks over torch.distributed: what parallel attention and the engine exchange, and nothing more."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from safelight.errors import RankError


class GroupLink:
    """A process group as a link. Every rank of it makes the same calls in the same order.

    Raises RankError where another rank has ended or doesn't answer within the group's time limit.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.size = len(self._ranks)

    def exchange(self, send: Tensor, send_lengths: Sequence[int], receive_lengths: Sequence[int]) -> Tensor:
        """All to all: parts of `send` along its first dimension for each rank; gives what came from each, joined."""
        receive = send.new_empty((sum(receive_lengths), *send.shape[1:]))
        with watched():
            dist.all_to_all_single(
                receive, send.contiguous(), list(receive_lengths), list(send_lengths), group=self._group
            )
        return receive

    def pass_on(self, send: Tensor, receive: Tensor) -> Callable[[], None]:
        """Start sending to the next rank, and receiving what the one before sends; calling the result waits for both.

        Neither tensor may be touched in between; both are contiguous.
        """
        to, source = self._ranks[(self.rank + 1) % self.size], self._ranks[(self.rank - 1) % self.size]
        with watched():
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, send, to, self._group), dist.P2POp(dist.irecv, receive, source, self._group)]
            )

        def wait() -> None:
            with watched():
                for work in works:
                    work.wait()

        return wait

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int = 1) -> Tensor:
        """What every rank has of a tensor, joined along `dim`, of which rank i has `lengths[i]`."""
        # As long as the longest everywhere: not every library gathers what is unequal.
        longest = max(lengths)
        padded = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, longest - x.shape[dim])).contiguous()
        parts = [torch.empty_like(padded) for _ in lengths]
        with watched():
            dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim=dim)

    def gather_values(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks; plain data."""
        values: list[Any] = [None] * self.size
        with watched():
            dist.all_gather_object(values, value, group=self._group)
        return values


@contextmanager
def watched() -> Iterator[None]:
    """Gloo and NCCL tell of a lost peer by RuntimeErrors of many texts; nothing else fails in a call that is right."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Without the place in torch's source.
        cause = re.sub(r"^\[[^]]*\] ", "", (str(error).strip().splitlines() or [type(error).__name__])[0])
        raise RankError(
            f"another rank of the parallel run has ended or doesn't answer: {cause}", cause=cause
        ) from error
