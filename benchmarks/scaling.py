"""Scaling on paper: the time of a denoising step of Wan 2.1 14B on 1 to 64 H100s, from volumes and public figures.

    python benchmarks/scaling.py [--gpus 8 16] [--json] [--write]

Nothing is run and torch isn't imported. The bytes sent are those of `safelight.attention.volume`, which a test holds to
what the links count; the bytes moved in a GPU's own memory and the weights are counted on the model itself by
tests/unit/test_scaling.py, which also holds docs/scaling.md to this program. `--write` writes the page's tables anew.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safelight.attention.grid import Grid, SharedSequence, check_grid, grids_of, shard_lengths
from safelight.attention.requirements import AttentionRequirements
from safelight.attention.volume import gather_bytes, ring_bytes, ulysses_bytes
from safelight.errors import RequestError
from safelight.models.wan_config import WanConfig
from safelight.planning import PUBLISHED, layers_of, shapes_of
from safelight.request import Request

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
MODEL = "wan2.1-14b"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
BETWEEN_NODES = 40  # GPUs, over five nodes: the fewest whose Ulysses group can be larger than a node
NUM_STEPS = 50

# Bytes read and written by what is neither a matrix product nor the kernel, in units of one activation: rows x own
# tokens x hidden size x bytes of an element. tests/unit/test_scaling.py counts them, operation by operation.
BLOCK_PASSES = 96.0  # norms, modulation, rotary positions, gates, residual sums; many of them in float32
GELU_PASSES = 2.0  # times ffn_dim / dim
ULYSSES_PASSES = 8.0  # packing queries, keys and values, and packing the output
RING_PASSES = 10.0  # the first block and the output of a ring, to float32 and back; stacking keys and values
SHARDED_PASSES = 2.0  # making the output contiguous
MERGE_PASSES = 13.3  # adding the attention to one more block
# The most that lives at once while a block runs, in the same unit: alone, Ulysses, ring of two, longer ring.
ALONE_LIVE, ULYSSES_LIVE, PAIR_LIVE, RING_LIVE, BOTH_LIVE = 12.0, 15.0, 18.1, 20.1, 6.0
# What every rank loads, in bytes: the same test counts the parameters.
WEIGHTS_BYTES = {"transformer": 28_635_351_168, "text_encoder": 11_361_820_672, "vae": 293_182_412}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs in nodes, and what they reach. Rates are FLOP/s and bytes/s, in one direction for links.

    `attention_flops` are (keys, FLOP/s) of the kernel in rising order of keys. A `tile` of a matrix product is rows by
    columns, of attention the queries of a head; each occupies one of `num_processors`, and the last round of tiles may
    leave some of them idle. `call_s` is what starting a message takes.
    """

    name: str
    product_flops: float
    attention_flops: tuple[tuple[int, float], ...]
    memory_rate: float
    memory_bytes: int
    num_processors: int
    node_size: int
    node_rate: float
    network_rate: float
    call_s: float
    product_tile: tuple[int, int] = (128, 256)
    attention_tile: int = 128


# NVIDIA, "H100 Tensor Core GPU" data sheet, 2023 (SXM): 989 TFLOP/s of dense bfloat16, 80 GB at 3.35 TB/s, NVLink of
# 900 GB/s, 450 each way; 132 streaming multiprocessors (NVIDIA, "H100 Tensor Core GPU Architecture", 2022).
H100 = Cluster(
    name="H100 SXM",
    # Ours: four fifths of the best shape's 821 TFLOP/s (mag-/gpu_benchmark, 2024, "H100 SXM 80GB").
    product_flops=650e12,
    # FlashAttention-3, bfloat16, head_dim 128, not causal, 16 heads: pytorch/benchmark, pull request 2391, 2024.
    attention_flops=tuple(
        (keys, tera * 1e12)
        for keys, tera in ((512, 430.3), (1024, 517.1), (2048, 565.5), (4096, 590.2), (8192, 614.2), (16384, 620.7))
    ),
    memory_rate=0.9 * 3.35e12,  # ours: nine tenths of the data sheet
    memory_bytes=80_000_000_000,
    num_processors=132,
    node_size=8,
    node_rate=370e9,  # of 450: what NCCL reaches, by one of its authors (NVIDIA/nccl-tests, issue 212, 2024)
    network_rate=48e9,  # of 50 (400 Gbit/s for each GPU): 48 to 49 by NCCL (NVIDIA/nccl-tests, issue 267, 2025)
    call_s=30e-6,  # ours
)
# NVIDIA, "H200 Tensor Core GPU" data sheet, 2024: the same processor with 141 GB at 4.8 TB/s.
H200 = replace(H100, name="H200", memory_rate=0.9 * 4.8e12, memory_bytes=141_000_000_000)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One denoising step: a model's transformer, what its self-attention asks, and how much there is to do.

    `rows` are guidance's branches, `tokens` those of the video, `text` the keys of cross-attention, `latents` the
    numbers in a latent.
    """

    config: WanConfig
    need: AttentionRequirements
    rows: int
    tokens: int
    text: int
    latents: int
    itemsize: int = 2

    @classmethod
    def published(cls, model: str = MODEL, *, width: int = 1280, height: int = 720, num_frames: int = 81) -> "Work":
        """A step of a published model in bfloat16, at a size that it can do. Raises RequestError."""
        document = json.loads((PUBLISHED / f"{model}.json").read_text(encoding="utf-8"))["components"]
        config = WanConfig.from_json(document["transformer"], model)
        request = Request(prompt="any", width=width, height=height, num_frames=num_frames)
        shapes = {name: shape for shape, names in shapes_of(model, request)("bfloat16").items() for name in names}
        needs = [group.requirements for group in layers_of(model)("bfloat16")]
        (need,) = [need for need in needs if (need.component, need.role) == ("transformer", "self")]
        own, cross = shapes["transformer.self"], shapes["transformer.cross"]
        latents = own.queries * config.out_channels * math.prod(config.patch_size)
        return cls(config=config, need=need, rows=own.batch, tokens=own.queries, text=cross.keys, latents=latents)

    @property
    def sequence(self) -> SharedSequence:
        """What the ranks share."""
        channels = self.config.out_channels * math.prod(self.config.patch_size)
        return SharedSequence(rows=self.rows, tokens=self.tokens, channels=channels)

    def rows_of(self, grid: Grid) -> int:
        """The guidance branches that a rank runs."""
        return -(-self.rows // grid.cfg)

    def activation_bytes(self, grid: Grid) -> int:
        """One activation of a rank: its rows and tokens by the hidden size."""
        return self.rows_of(grid) * shard_lengths(self.tokens, grid.num_shards)[0] * self.config.dim * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Step:
    """The seconds of one step on the rank with the most to do; communication is what compute doesn't hide."""

    grid: Grid
    products_s: float
    attention_s: float
    elementwise_s: float
    merging_s: float
    ulysses_s: float
    ring_wait_s: float
    once_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        total: float = sum(value for name, value in vars(self).items() if name.endswith("_s"))
        return total

    @property
    def waiting_s(self) -> float:
        """Time in which nothing is computed."""
        return self.ulysses_s + self.ring_wait_s + self.once_s


def busy(tiles: int, processors: int) -> float:
    """The share of the processors that have a tile, over all rounds."""
    return tiles / (processors * math.ceil(tiles / processors))


def product_s(rows: int, columns: int, inner: int, cluster: Cluster) -> float:
    """The seconds of a matrix product of [rows, inner] and [inner, columns]."""
    tiles = math.ceil(rows / cluster.product_tile[0]) * math.ceil(columns / cluster.product_tile[1])
    return 2.0 * rows * columns * inner / (cluster.product_flops * busy(tiles, cluster.num_processors))


def attention_s(rows: int, queries: int, keys: int, heads: int, head_dim: int, cluster: Cluster) -> float:
    """The seconds of one call of the kernel: 4 rows heads queries keys head_dim operations."""
    rates = cluster.attention_flops
    rate = max((flops for at, flops in rates if at <= keys), default=rates[0][1])
    tiles = rows * heads * math.ceil(queries / cluster.attention_tile)
    return 4.0 * rows * heads * queries * keys * head_dim / (rate * busy(tiles, cluster.num_processors))


def products_per_block(config: WanConfig) -> tuple[tuple[int, int], ...]:
    """(columns, inner) of a block's matrix products; the text's keys and values are made once per request."""
    dim, ffn = config.dim, config.ffn_dim
    return ((3 * dim, dim), (dim, dim), (dim, dim), (dim, dim), (ffn, dim), (dim, ffn))


def step_time(work: Work, cluster: Cluster, grid: Grid) -> Step:
    """The time of a step on a grid that `check_grid` accepts."""
    config, layers = work.config, work.config.num_layers
    rows, own = work.rows_of(grid), shard_lengths(work.tokens, grid.num_shards)[0]
    activation = work.activation_bytes(grid)
    products = sum(product_s(rows * own, columns, inner, cluster) for columns, inner in products_per_block(config))
    patch = config.in_channels * math.prod(config.patch_size)
    ends = product_s(rows * own, config.dim, patch, cluster) + product_s(rows * own, patch, config.dim, cluster)
    heads, head_dim = config.num_attention_heads, config.attention_head_dim
    cross = attention_s(rows, own, work.text, heads, head_dim, cluster)
    kernel, merging, wait = ring_turns(work, cluster, grid)
    passes = BLOCK_PASSES + GELU_PASSES * config.ffn_dim / config.dim
    passes += ULYSSES_PASSES * (grid.ulysses > 1) + SHARDED_PASSES * (grid.num_shards > 1)
    return Step(
        grid=grid,
        products_s=layers * products + ends,
        attention_s=layers * (kernel + cross),
        elementwise_s=layers * passes * activation / cluster.memory_rate,
        merging_s=layers * merging,
        ulysses_s=layers * ulysses_s(work, cluster, grid),
        ring_wait_s=layers * wait,
        once_s=once_s(work, cluster, grid),
    )


def ring_turns(work: Work, cluster: Cluster, grid: Grid) -> tuple[float, float, float]:
    """A layer's seconds in the kernel, in merging, and waiting for blocks that computing hasn't hidden.

    In each of R turns a rank attends with its heads to one block, and merges; all but the last turn also send a block
    on, and take as long as the longer of both.
    """
    rows, heads = work.rows_of(grid), work.config.num_attention_heads // grid.ulysses
    shards = shard_lengths(work.tokens, grid.num_shards)
    block = sum(shards[: grid.ulysses])
    kernel = attention_s(rows, block, block, heads, work.config.attention_head_dim, cluster)
    if grid.ring == 1:
        return kernel, 0.0, 0.0
    activation = work.activation_bytes(grid)
    ends, merge = (passes * activation / cluster.memory_rate for passes in (RING_PASSES, MERGE_PASSES))
    sent = max(ring_bytes(work.need, grid, batch=rows, tokens=work.tokens, itemsize=work.itemsize)) / (grid.ring - 1)
    send = cluster.call_s + sent / slowest(cluster, ring_hops(grid))
    waits = [max(0.0, send - kernel - (merge if turn else ends)) for turn in range(grid.ring - 1)]
    return grid.ring * kernel, ends + (grid.ring - 1) * merge, sum(waits)


def slowest(cluster: Cluster, pairs: Iterable[tuple[int, int]]) -> float:
    """Bytes/s of the slowest link between pairs of ranks, which are numbered through the nodes."""
    is_near = all(a // cluster.node_size == b // cluster.node_size for a, b in pairs)
    return cluster.node_rate if is_near else cluster.network_rate


def ring_hops(grid: Grid) -> Iterator[tuple[int, int]]:
    """Who sends blocks to whom."""
    for first in range(0, grid.num_ranks, grid.num_shards):
        for rank in range(grid.num_shards):
            yield first + rank, first + (rank + grid.ulysses) % grid.num_shards


def ulysses_s(work: Work, cluster: Cluster, grid: Grid) -> float:
    """A layer's seconds in the two exchanges of Ulysses: what goes to the same node and to others goes side by side."""
    if grid.ulysses == 1:
        return 0.0
    sent = max(ulysses_bytes(work.need, grid, batch=work.rows_of(grid), tokens=work.tokens, itemsize=work.itemsize)) / (
        grid.ulysses - 1
    )
    far = max(
        sum(rank // cluster.node_size != other // cluster.node_size for other in group)
        for group in ulysses_groups(grid)
        for rank in group
    )
    near = grid.ulysses - 1 - far
    return 2 * cluster.call_s + max(near * sent / cluster.node_rate, far * sent / cluster.network_rate)


def ulysses_groups(grid: Grid) -> list[range]:
    """The ranks of each Ulysses group: neighbours."""
    return [range(first, first + grid.ulysses) for first in range(0, grid.num_ranks, grid.ulysses)]


def once_s(work: Work, cluster: Cluster, grid: Grid) -> float:
    """Seconds once a step: gathering the output of a branch, and one float32 latent from the other branch."""
    seconds = 0.0
    if grid.num_shards > 1:
        channels = work.sequence.channels
        sent = gather_bytes(
            grid, batch=work.rows_of(grid), tokens=work.tokens, channels=channels, itemsize=work.itemsize
        )
        seconds += cluster.call_s + sent / slowest(cluster, ring_hops(replace(grid, ulysses=1, ring=grid.num_shards)))
    if grid.cfg > 1:
        pairs = ((rank, rank + grid.num_shards) for rank in range(grid.num_shards))
        seconds += cluster.call_s + 4 * work.latents / slowest(cluster, pairs)
    return seconds


def memory_bytes(work: Work, grid: Grid) -> int:
    """The most that a rank holds while it denoises: every component's weights, the text's keys and values, a block."""
    config = work.config
    live = ALONE_LIVE if grid.ulysses == 1 else ULYSSES_LIVE
    if grid.ring > 1:
        live = (PAIR_LIVE if grid.ring == 2 else RING_LIVE) + BOTH_LIVE * (grid.ulysses > 1)
    text = 2 * config.num_layers * work.rows_of(grid) * work.text * config.dim * work.itemsize
    return sum(WEIGHTS_BYTES.values()) + text + round(live * work.activation_bytes(grid))


def grids(work: Work, num_gpus: int) -> list[Grid]:
    """Every grid of so many ranks that the model's heads and guidance allow; the fewest branches on a rank last."""
    found = []
    for grid in grids_of(num_gpus):
        try:
            check_grid(grid, [work.need], {work.need.component: work.sequence})
        except RequestError:
            continue
        found.append(grid)
    return found


def steps(work: Work, cluster: Cluster, num_gpus: int) -> list[Step]:
    """The steps of every grid, the fastest first."""
    return sorted((step_time(work, cluster, grid) for grid in grids(work, num_gpus)), key=lambda step: step.total_s)


def hidden_block(cluster: Cluster, rate: float, itemsize: int = 2) -> float:
    """The fewest tokens a ring's block must have for its way over a link of `rate` bytes/s to hide behind the kernel.

    A turn computes 4 B m m (H / U) D operations and sends 2 B m (K / U) D itemsize bytes of a block of m tokens; with
    K = H everything cancels but m, the kernel's rate and the link's. The rate of the kernel is that of long blocks.
    """
    return cluster.attention_flops[-1][1] * itemsize / (2 * rate)


def rule_rows(work: Work, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """How long a ring may be before a rank waits for blocks."""
    yield ("hops over", "GB/s", "a block has at least", f"longest ring for {work.tokens:,} tokens")
    for name, rate in (("NVLink", cluster.node_rate), ("the network", cluster.network_rate)):
        fewest = hidden_block(cluster, rate)
        yield (name, f"{rate / 1e9:.0f}", f"{fewest:,.0f} tokens", str(int(work.tokens // fewest)))


def short(grid: Grid) -> str:
    """A grid as cfg x ulysses x ring."""
    return f"{grid.cfg} × {grid.ulysses} × {grid.ring}"


def best_rows(work: Work, cluster: Cluster, counts: Sequence[int] = COUNTS) -> Iterator[tuple[str, ...]]:
    """The fastest grid for each number of GPUs, and where its time goes."""
    yield (
        *("GPUs", "cfg × ulysses × ring", "a step, s", f"{NUM_STEPS} steps, s", "speed-up", "of ideal"),
        *("products", "attention", "elementwise", "merging", "waiting", "memory, GB"),
    )
    alone = step_time(work, cluster, Grid()).total_s
    for count in counts:
        step = steps(work, cluster, count)[0]
        parts = (step.products_s, step.attention_s, step.elementwise_s, step.merging_s, step.waiting_s)
        yield (
            *(str(count), short(step.grid), f"{step.total_s:.2f}", f"{NUM_STEPS * step.total_s:.0f}"),
            *(f"{alone / step.total_s:.1f}", f"{alone / step.total_s / count:.0%}"),
            *(f"{part / step.total_s:.1%}" for part in parts),
            f"{memory_bytes(work, step.grid) / 1e9:.0f}",
        )


def grid_rows(work: Work, cluster: Cluster, counts: Sequence[int] = COUNTS) -> Iterator[tuple[str, ...]]:
    """Every grid: its time, what waits, and what a rank sends in one layer."""
    yield (
        *("GPUs", "cfg × ulysses × ring", "a step, s", "Ulysses, s", "ring waits, s", "merging, s"),
        *("Ulysses sends, MB", "ring sends, MB", "ring crosses nodes", "memory, GB"),
    )
    for count in counts:
        for step in steps(work, cluster, count):
            grid = step.grid
            sizes = {"batch": work.rows_of(grid), "tokens": work.tokens, "itemsize": work.itemsize}
            is_far = grid.ring > 1 and slowest(cluster, ring_hops(grid)) == cluster.network_rate
            yield (
                *(str(count), short(grid), f"{step.total_s:.3f}", f"{step.ulysses_s:.3f}", f"{step.ring_wait_s:.3f}"),
                f"{step.merging_s:.3f}",
                f"{max(ulysses_bytes(work.need, grid, **sizes)) / 1e6:.0f}",
                f"{max(ring_bytes(work.need, grid, **sizes)) / 1e6:.0f}",
                *("yes" if is_far else "no", f"{memory_bytes(work, grid) / 1e9:.1f}"),
            )


def changed_rows(work: Work, cluster: Cluster, counts: Sequence[int] = COUNTS) -> Iterator[tuple[str, ...]]:
    """Which grid wins where an assumption is changed, and how much slower the grid of the first row is then."""
    yield ("changed", *(f"{count} GPUs" for count in counts if count > 1))
    flops = cluster.attention_flops
    cases = {
        "nothing": (work, cluster),
        "kernel at 0.6 of its rate": (work, replace(cluster, attention_flops=tuple((n, 0.6 * f) for n, f in flops))),
        "kernel at 740 TFLOP/s": (work, replace(cluster, attention_flops=((1, 740e12),))),
        "kernel without idle processors": (work, replace(cluster, attention_tile=1)),
        "NVLink at half its rate": (work, replace(cluster, node_rate=cluster.node_rate / 2)),
        "200 Gbit/s between nodes": (work, replace(cluster, network_rate=cluster.network_rate / 2)),
        "100 Gbit/s between nodes": (work, replace(cluster, network_rate=cluster.network_rate / 4)),
        "480p (832×480)": (Work.published(width=832, height=480), cluster),
    }
    usual = {count: steps(work, cluster, count)[0].grid for count in counts if count > 1}
    for name, (other_work, other) in cases.items():
        cells = []
        for count, grid in usual.items():
            best = steps(other_work, other, count)[0]
            slower = step_time(other_work, other, grid).total_s / best.total_s - 1
            cells.append(short(best.grid) + (f" (+{slower:.1%})" if best.grid != grid else ""))
        yield (name, *cells)


def published_rows(work: Work, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """What others have measured, and what this model says of it."""
    yield ("measured by others", "s", "this model, s", "measured / model")
    one = replace(work, rows=1)
    # FlashAttention-2 reaches 35 % of an H100 (Shah et al. 2024, arXiv 2407.08608).
    older = replace(H200, attention_flops=((1, 0.35 * 989e12),))
    alone = step_time(one, H200, Grid()).total_s
    eight = step_time(work, cluster, Grid(ulysses=8)).total_s
    for what, measured_s, model_s in (
        ("FastVideo 2025, one H200, FlashAttention-2: 1746.5 s for 50 steps of 2 passes", 1746.5 / 100, None),
        ("FastVideo 2025, one H200, FlashAttention-3: 37.87 s for 3 steps of 1 pass", 37.87 / 3, alone),
        ("the same with torch.compile: 29.5 s", 29.5 / 3, alone),
        (
            "Morphic 2025, 8 H100, Ulysses 8, Wan 2.2 image to video, whole clip: 195.13 s for 40 steps",
            195.13 / 40,
            eight,
        ),
    ):
        said = step_time(one, older, Grid()).total_s if model_s is None else model_s
        yield (what, f"{measured_s:.2f}", f"{said:.2f}", f"{measured_s / said:.2f}")


def between_nodes_rows(work: Work, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Every grid of five nodes, where Ulysses may reach beyond one."""
    return grid_rows(work, cluster, (BETWEEN_NODES,))


TABLES: Mapping[str, Callable[[Work, Cluster], Iterator[tuple[str, ...]]]] = {
    "best": best_rows,
    "rule": rule_rows,
    "changed": changed_rows,
    "between nodes": between_nodes_rows,
    "measured": published_rows,
    "grids": grid_rows,
}


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    """A table, of which the first row is the head."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *body))


def page_with_tables(text: str, work: Work, cluster: Cluster) -> str:
    """The page with each table between its marks made anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{markdown(TABLES[match[2]](work, cluster))}\n<!-- end -->"

    return re.sub(r"(<!-- table: ([\w ]+) -->)\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None, page: Path = PAGE) -> None:
    """Print the times, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=list(COUNTS), metavar="N")
    parser.add_argument("--json", action="store_true", help="print every grid's times in seconds")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/scaling.md anew")
    given = parser.parse_args(arguments)
    if min(given.gpus) < 1:
        parser.error(f"--gpus is {min(given.gpus)}; it must be at least 1")
    work = Work.published()
    if given.write:
        page.write_text(page_with_tables(page.read_text(encoding="utf-8"), work, H100), encoding="utf-8")
        return
    if given.json:
        found = [step for count in given.gpus for step in steps(work, H100, count)]
        rows = [
            {**asdict(step), "total_s": step.total_s, "memory_bytes": memory_bytes(work, step.grid)} for step in found
        ]
        print(json.dumps({"model": MODEL, "tokens": work.tokens, "gpu": H100.name, "steps": rows}))
        return
    print(markdown(best_rows(work, H100, given.gpus)), markdown(grid_rows(work, H100, given.gpus)), sep="\n\n")


if __name__ == "__main__":
    main()
