"""docs/scaling.md is what its program computes, and what the program assumes of the engine is counted on the engine."""

import json
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.against_diffusers import forward_flops
from benchmarks.scaling import (
    BETWEEN_NODES,
    BLOCK_PASSES,
    COUNTS,
    GELU_PASSES,
    H100,
    MERGE_PASSES,
    PAGE,
    RING_PASSES,
    SHARDED_PASSES,
    TABLES,
    ULYSSES_PASSES,
    WEIGHTS_BYTES,
    Work,
    grids,
    hidden_block,
    main,
    memory_bytes,
    page_with_tables,
    ring_hops,
    slowest,
    step_time,
    steps,
    ulysses_s,
)
from safelight.attention.backend import Layout
from safelight.attention.grid import Grid, shard_lengths
from safelight.attention.layer import Attention
from safelight.attention.parallel import over_ranks
from safelight.attention.volume import ring_bytes, ulysses_bytes
from safelight.models import umt5
from safelight.models.umt5 import Umt5Encoder
from safelight.models.umt5_config import Umt5Config
from safelight.models.wan import WanTransformer, keeps_float32
from safelight.models.wan_config import WanConfig
from safelight.models.wan_vae import WanVaeDecoder
from safelight.models.wan_vae_config import WanVaeConfig
from safelight.planning import PUBLISHED

WORK = Work.published()
PUBLISHED_CONFIGS = json.loads((PUBLISHED / "wan2.1-14b.json").read_text())["components"]
# A machine on which every operation takes a second, and nothing else any time.
COUNTER = replace(
    H100,
    product_flops=1.0,
    attention_flops=((1, 1.0),),
    num_processors=1,
    memory_rate=math.inf,
    node_rate=math.inf,
    network_rate=math.inf,
    call_s=0.0,
)


def test_the_page_is_what_the_program_computes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"^<!-- table: ([\w ]+) -->$", text, re.MULTILINE)) == sorted(TABLES)
    assert text == page_with_tables(text, WORK, H100), "python benchmarks/scaling.py --write makes its tables anew"


def test_another_number_on_the_page_is_seen() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(text, WORK, replace(H100, node_rate=360e9)) != text
    assert page_with_tables(text.replace("| 22.93 |", "| 22.94 |"), WORK, H100) == text


def test_what_the_page_says_beside_its_tables() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    best = {count: steps(WORK, H100, count)[0] for count in (*COUNTS, BETWEEN_NODES)}
    assert all(step.grid.cfg == 2 for count, step in best.items() if count > 1)
    ring = step_time(WORK, H100, Grid(ring=64)).total_s
    assert "almost seven times as slow" in text and 6.5 < ring / best[64].total_s < 7
    assert "hardly faster than 8 GPUs" in text and 0.9 < ring / best[8].total_s < 1
    assert "enough for 80 GPUs" in text
    assert steps(WORK, H100, 80)[0].grid == Grid(ulysses=8, ring=5, cfg=2)
    assert step_time(WORK, H100, Grid(ulysses=8, ring=5, cfg=2)).ring_wait_s == 0
    assert "with eight" in text and step_time(WORK, H100, Grid(ulysses=8, ring=8, cfg=2)).ring_wait_s > 0
    assert f"({BLOCK_PASSES:.0f} + {GELU_PASSES:.0f} f/d) A" in text
    assert f"{ULYSSES_PASSES:.0f} A; {SHARDED_PASSES:.0f} A" in text
    assert f"{RING_PASSES:.0f} A; {MERGE_PASSES} A" in text
    assert f"{H100.node_rate / 1e9:.0f} GB/s" in text and f"{H100.network_rate / 1e9:.0f} GB/s" in text
    assert [f"{size / 1e9:.1f} GB" in text for size in WEIGHTS_BYTES.values()] == [True] * 3
    assert f"exchanges one latent a step, {4 * WORK.latents / 1e6:.0f} MB" in text


def test_the_work_is_that_of_the_published_model() -> None:
    # 21 latent frames of 90 by 160, in patches of 1 by 2 by 2, two branches.
    assert (WORK.tokens, WORK.rows, WORK.text) == (21 * 45 * 80, 2, 512)
    assert WORK.latents == 16 * 21 * 90 * 160
    assert (WORK.config.num_layers, WORK.config.dim, WORK.config.ffn_dim) == (40, 5120, 13824)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_operations_of_all_ranks_are_those_of_one_process(count: int) -> None:
    """75,600 tokens divide evenly up to 16 ranks; the tiles of a rank without idle processors don't matter."""
    whole = WORK.rows * forward_flops(WORK.config, WORK.tokens, WORK.text)
    for grid in grids(WORK, count):
        step = step_time(WORK, COUNTER, grid)
        assert count * (step.products_s + step.attention_s) == pytest.approx(whole, rel=1e-9)
        assert step.total_s == step.products_s + step.attention_s


def test_grids_are_all_that_40_heads_allow() -> None:
    found = {(grid.cfg, grid.ulysses, grid.ring) for grid in grids(WORK, 64)}
    assert found == {(c, u, 64 // c // u) for c in (1, 2) for u in (1, 2, 4, 8)}
    assert {grid.ulysses for grid in grids(WORK, BETWEEN_NODES)} == {1, 2, 4, 5, 8, 10, 20, 40}


def test_a_ring_waits_where_its_blocks_are_shorter_than_the_rule_says() -> None:
    waited = {True: 0, False: 0}
    for count in (*COUNTS, BETWEEN_NODES):
        for grid in (grid for grid in grids(WORK, count) if grid.ring > 1):
            block = sum(shard_lengths(WORK.tokens, grid.num_shards)[: grid.ulysses])
            fewest = hidden_block(H100, slowest(H100, ring_hops(grid)))
            waits = step_time(WORK, H100, grid).ring_wait_s > 0
            # Merging and idle processors hide a little more; starting a message hides a little less.
            if block > 1.05 * fewest or block < 0.75 * fewest:
                assert waits == (block < fewest), grid
                waited[waits] += 1
    assert min(waited.values()) > 10


def test_what_crosses_nodes_goes_by_the_network() -> None:
    assert set(ring_hops(Grid(ulysses=2, ring=2, cfg=2))) == {
        *((0, 2), (1, 3), (2, 0), (3, 1)),
        *((4, 6), (5, 7), (6, 4), (7, 5)),
    }
    assert slowest(H100, ring_hops(Grid(ulysses=4, ring=2, cfg=2))) == H100.node_rate
    assert slowest(H100, ring_hops(Grid(ulysses=4, ring=4))) == H100.network_rate


def test_ulysses_sends_to_its_node_and_beyond_side_by_side() -> None:
    inside, across = Grid(ulysses=8), Grid(ulysses=40)
    # 7 of 8 parts of 120 heads there and 40 back, of 9,450 tokens of two branches, 256 bytes a head.
    assert ulysses_s(WORK, H100, inside) == pytest.approx(7 / 8 * 9450 * 2 * 160 * 256 / 370e9 + 60e-6)
    # 32 of 40 parts leave the node.
    assert ulysses_s(WORK, H100, across) == pytest.approx(32 / 40 * 1890 * 2 * 160 * 256 / 48e9 + 60e-6)
    assert ulysses_s(WORK, H100, Grid(ring=8)) == 0


def test_bytes_are_the_engine_s() -> None:
    rows = [
        line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| 16 | 2 ×")
    ]
    (row,) = [row for row in rows if row[1] == "2 × 4 × 2"]
    sizes = {"batch": 1, "tokens": WORK.tokens, "itemsize": 2}
    grid = Grid(ulysses=4, ring=2, cfg=2)
    assert row[6:8] == [f"{max(count(WORK.need, grid, **sizes)) / 1e6:.0f}" for count in (ulysses_bytes, ring_bytes)]


class Counting(TorchDispatchMode):
    """The bytes that operations read and write, but for products and what makes no values; and the most alive."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.live = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        before = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        after = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        given = {x.untyped_storage()._cdata for x in before}
        new = [x for x in after if x.untyped_storage()._cdata not in given]
        for x in new:
            self.hold(x)
        name = function.__name__.split(".")[0]
        makes_values = bool(new) or function._schema.is_mutable
        if makes_values and name not in ("linear", "mm", "addmm", "empty", "empty_like", "new_empty"):
            self.moved += sum(x.nbytes for x in (*before, *after))
        return result

    def hold(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.live += storage.nbytes()
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self.release, storage._cdata, storage.nbytes())

    def release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


class Nobody:
    """A link on which what arrives has a shape and no values."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def exchange(self, send: Tensor, send_lengths: Any, receive_lengths: Any) -> Tensor:
        return send.contiguous().new_empty((sum(receive_lengths), *send.shape[1:]))

    def pass_on(self, send: Tensor, receive: Tensor) -> Callable[[], None]:
        return lambda: None


def counted_block(grid: Grid) -> tuple[Counting, int]:
    """A block of the whole model on the first rank of a grid, without values; and the bytes of an activation."""
    config = replace(WORK.config, num_layers=1)
    need = WORK.need.replace(needs_lse=grid.ring > 1)

    def kernel(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        out = torch.empty_like(q)
        return (out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)) if need.needs_lse else out

    rows, shards = WORK.rows_of(grid), shard_lengths(WORK.tokens, grid.num_shards)
    with torch.device("meta"), torch.inference_mode():
        model = WanTransformer(config, torch.bfloat16)
        for name, parameter in model.named_parameters():
            if not keeps_float32(name):
                parameter.data = parameter.data.bfloat16()
        model.fuse()
        block = model.blocks[0]
        own, cross = (layer for layer in block.modules() if isinstance(layer, Attention))
        assert (own.requirements.role, cross.requirements.role) == ("self", "cross")
        own.kernel = over_ranks(kernel, own.requirements, Nobody(grid.ulysses), Nobody(grid.ring))
        cross.kernel = lambda q, k, v, **how: torch.empty_like(q)
        text = torch.empty(rows, WORK.text, config.num_attention_heads, config.attention_head_dim, dtype=torch.bfloat16)
        rotary = torch.empty(shards[0], config.attention_head_dim // 2, dtype=torch.complex64)
        x = torch.empty(rows, shards[0], config.dim, dtype=torch.bfloat16)
        counting = Counting()
        counting.hold(x)
        with counting:
            block(x, torch.empty(6, config.dim), text, text, None, rotary, Layout(step=0, shards=shards))
    return counting, x.nbytes


GRIDS = [(1, 1, 1), (2, 1, 1), (8, 1, 2), (1, 2, 1), (1, 8, 1), (4, 2, 2), (8, 4, 2), (8, 8, 1)]


@pytest.mark.parametrize(("ulysses", "ring", "cfg"), GRIDS)
def test_bytes_moved_and_alive_are_those_of_the_model(ulysses: int, ring: int, cfg: int) -> None:
    grid = Grid(ulysses=ulysses, ring=ring, cfg=cfg)
    counting, activation = counted_block(grid)
    assert activation == WORK.activation_bytes(grid)

    # What a byte a second takes a second for is what is moved.
    slow = replace(COUNTER, product_flops=math.inf, attention_flops=((1, math.inf),), memory_rate=1.0)
    step = step_time(WORK, slow, grid)
    moved = (step.elementwise_s + step.merging_s) / WORK.config.num_layers
    assert counting.moved == pytest.approx(moved, rel=2e-3)

    text = 2 * WORK.config.num_layers * WORK.rows_of(grid) * WORK.text * WORK.config.dim * 2
    live = memory_bytes(WORK, grid) - sum(WEIGHTS_BYTES.values()) - text
    # The page's memory is never too low, and at most a tenth too high.
    assert counting.most <= live * 1.001 and live <= counting.most * 1.1


def test_weights_are_those_of_the_model() -> None:
    with torch.device("meta"):
        transformer = WanTransformer(WanConfig.from_json(PUBLISHED_CONFIGS["transformer"]), torch.bfloat16)
        encoder = Umt5Encoder(Umt5Config.from_json(PUBLISHED_CONFIGS["text_encoder"]), "bfloat16")
        vae = WanVaeDecoder(WanVaeConfig.from_json(PUBLISHED_CONFIGS["vae"]), torch.float32)
    sizes = {
        "transformer": {name: 4 if keeps_float32(name) else 2 for name, _ in transformer.named_parameters()},
        "text_encoder": {
            name: 4 if umt5.weight_dtype(name, "bfloat16") == "float32" else 2 for name, _ in encoder.named_parameters()
        },
        "vae": {name: 4 for name, _ in vae.named_parameters()},
    }
    modules = {"transformer": transformer, "text_encoder": encoder, "vae": vae}
    counted = {
        name: sum(parameter.numel() * sizes[name][key] for key, parameter in module.named_parameters())
        for name, module in modules.items()
    }
    assert counted == WEIGHTS_BYTES


def test_every_grid_fits_into_memory() -> None:
    assert all(memory_bytes(WORK, grid) < H100.memory_bytes for count in COUNTS for grid in grids(WORK, count))


def test_the_program_prints_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gpus", "2", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [step["grid"] for step in printed["steps"]] == [step.grid.to_json() for step in steps(WORK, H100, 2)]
    assert printed["steps"][0]["total_s"] == steps(WORK, H100, 2)[0].total_s

    main(["--gpus", "1"])
    assert "| 1 | 1 × 1 × 1 | 22.93 |" in capsys.readouterr().out

    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table: rule -->\nold\n<!-- end -->\nAfter.\n", encoding="utf-8")
    main(["--write"], page)
    assert re.fullmatch(
        r"Before\.\n<!-- table: rule -->\n\| hops over .*\n<!-- end -->\nAfter\.\n", page.read_text(), re.DOTALL
    )

    with pytest.raises(SystemExit) as ended:
        main(["--gpus", "0"])
    assert ended.value.code == 2 and "--gpus is 0" in capsys.readouterr().err
