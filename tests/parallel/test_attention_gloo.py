"""Parallel attention between processes, over Gloo: every cell of the grid equals one process."""

import time
from collections import defaultdict

import pytest
import torch

from safelight.attention import Layout, declared_backends
from safelight.attention.parallel import ring
from tests.parallel.cells import GRIDS, MASKS, ROLES, Cell, error, grid_cells, on_rank
from tests.parallel.gloo import mesh, on_processes

TOLERANCE = 1e-5
# All of the product: every combination is right, and none is refused.
CELLS = grid_cells()


def errors_on(rank: int, cells: list[Cell]) -> dict[str, float]:
    found = {}
    meshes = {}
    for cell in cells:
        grid = (cell.ulysses, cell.ring)
        if grid not in meshes:
            meshes[grid] = mesh(*grid)
        here = meshes[grid]
        found[cell.name] = error(cell, rank, on_rank(cell, here.ulysses, here.ring))
    return found


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, float]:
    """Each cell's largest error on any of its ranks."""
    by_size = defaultdict(list)
    for cell in CELLS:
        by_size[cell.grid.num_ranks].append(cell)
    found: dict[str, float] = {}
    for size, cells in by_size.items():
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        for one in on_processes(size, errors_on, folder, cells):
            found |= {name: max(value, found.get(name, 0.0)) for name, value in one.items()}
    return found


def test_the_cells_are_the_whole_product() -> None:
    assert len({cell.name for cell in CELLS}) == len(GRIDS) * len(ROLES) * len(MASKS) * 2 * 2 * 2 == 480


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_equals_one_process(cell, errors) -> None:
    assert errors[cell.name] < TOLERANCE


class SlowLink:
    """A link that holds back what is passed on, as a slow wire does; the sender goes on meanwhile."""

    def __init__(self, link, delay_s: float) -> None:
        self.link, self.delay_s = link, delay_s
        self.rank, self.size = link.rank, link.size

    def pass_on(self, send, receive):
        wait = self.link.pass_on(send, receive)
        arrives_s = time.perf_counter() + self.delay_s

        def slow_wait() -> None:
            wait()
            time.sleep(max(0.0, arrives_s - time.perf_counter()))

        return slow_wait


def times_on(rank: int, delay_s: float) -> dict[str, float]:
    """Seconds of ring attention whose blocks take `delay_s` to send and about twice as long to attend to."""
    here = mesh(1, 2).ring
    need = Cell(ulysses=1, ring=2, role="self", mask="no mask", tokens=8).grid.local(
        Cell(ulysses=1, ring=2, role="self", mask="no mask", tokens=8).requirements
    )
    load = declared_backends()["sdpa"].load
    assert load is not None
    kernel = load(need)

    def computing(*qkv, **options):
        result = kernel(*qkv, **options)
        time.sleep(2 * delay_s)  # as long on every machine
        return result

    q, k, v = torch.randn(3, 1, 8, 8, 16)
    layout = Layout(shards=(8, 8))

    def seconds(attend) -> float:
        times = []
        for _ in range(5):
            started_s = time.perf_counter()
            attend()
            times.append(time.perf_counter() - started_s)
        return sorted(times)[2]

    slow = SlowLink(here, delay_s)
    return {
        "fast link": seconds(lambda: ring(computing, here)(q, k, v, layout=layout)),
        "slow link": seconds(lambda: ring(computing, slow)(q, k, v, layout=layout)),
        "slow link, nothing to compute": seconds(lambda: ring(kernel, slow)(q, k, v, layout=layout)),
    }


@pytest.mark.slow
def test_what_is_sent_while_a_block_is_attended_to_costs_no_time(tmp_path) -> None:
    delay_s = 0.1
    for times in on_processes(2, times_on, tmp_path, delay_s):
        assert times["slow link, nothing to compute"] > delay_s
        # Two blocks of twice the delay each; without overlap the delay would come on top.
        assert times["slow link"] < times["fast link"] + delay_s / 2
