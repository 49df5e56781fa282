"""Ranks as threads of one process: links for tests of what happens between ranks, many cases a second."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TIMEOUT_S = 30.0


class Board:
    """Where the ranks of one group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.places: list[Any] = [None] * size

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value."""
        self.places[rank] = value
        self.barrier.wait()
        values = list(self.places)
        self.barrier.wait()
        return values


class ThreadLink:
    """One rank's end of a group; counts the bytes that it sends to others."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank
        self.size = board.size
        self.sent_bytes = 0

    def exchange(self, send: Tensor, send_lengths: Sequence[int], receive_lengths: Sequence[int]) -> Tensor:
        parts = send.split(list(send_lengths))
        self.sent_bytes += sum(part.nbytes for i, part in enumerate(parts) if i != self.rank)
        received = [sent[self.rank].clone() for sent in self.board.swap(self.rank, parts)]
        assert [len(part) for part in received] == list(receive_lengths)
        return torch.cat(received)

    def pass_on(self, send: Tensor, receive: Tensor) -> Callable[[], None]:
        assert send.is_contiguous() and receive.is_contiguous()
        self.sent_bytes += send.nbytes
        before = send.clone()

        def wait() -> None:
            assert torch.equal(send, before), "what is being sent was touched"
            receive.copy_(self.board.swap(self.rank, before)[(self.rank - 1) % self.size])

        return wait


def links(ulysses: int, ring: int) -> list[tuple[ThreadLink, ThreadLink]]:
    """Each rank's (Ulysses link, ring link), in the order of ranks."""
    groups = [Board(ulysses) for _ in range(ring)]
    rings = [Board(ring) for _ in range(ulysses)]
    return [(ThreadLink(groups[r], u), ThreadLink(rings[u], r)) for r in range(ring) for u in range(ulysses)]


def on_ranks(num_ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """What the function gives on each rank, all at the same time. Raises what a rank raises first."""
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001  # raised again below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
