"""Ranks as processes over Gloo, the library of a CPU."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from safelight.attention.grid import Grid
from safelight.distributed.mesh import Mesh

TIMEOUT_S = 60.0


def on_processes(num_ranks: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` gives in each of so many processes that are one group.

    The function is found by its module's name, as its arguments are by pickle.
    """
    torch.multiprocessing.spawn(_run, (num_ranks, function, str(folder), arguments), nprocs=num_ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def mesh(ulysses: int, ring: int, cfg: int = 1) -> Mesh:
    """This process's mesh, on the group that it is in."""
    return Mesh.over_all_ranks(Grid(ulysses=ulysses, ring=ring, cfg=cfg), timeout_s=TIMEOUT_S)


def _run(rank: int, num_ranks: int, function: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    # Cores are few where tests run, and ranks that wait for one another take turns.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        with torch.inference_mode():
            result = function(rank, *arguments)
        torch.save(result, os.path.join(folder, f"{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()
