"""Grids: what they share out, what a layer asks of the kernel on one rank, and what isn't split, with what would do."""

import pytest

from safelight.attention import AttentionRequirements
from safelight.attention.grid import Grid, SharedSequence, check_grid, grids_of, shard_lengths
from safelight.errors import RequestError

SELF = AttentionRequirements(
    head_dim=64, dtype="float32", num_heads=12, num_kv_heads=12, component="transformer", equal_lengths=True
)
CROSS = SELF.replace(role="cross", replicated_keys=True, equal_lengths=False)
TEXT = SELF.replace(component="text_encoder", is_auxiliary=True, num_heads=7, num_kv_heads=7, mask="bias")
VIDEO = {"transformer": SharedSequence(rows=2, tokens=30, channels=64)}


def refused(grid, *needs, sequences=None):
    with pytest.raises(RequestError) as caught:
        check_grid(grid, needs, sequences)
    return caught.value


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"ulysses": 0}, "ulysses is 0; it must be a whole number of at least 1"),
        ({"ring": 2.0}, "ring is 2.0; it must be a whole number of at least 1"),
        ({"cfg": 3}, "cfg_parallel is 3; it must be 1 or 2, since guidance has two branches"),
        ({"cfg": True}, "cfg_parallel is True; it must be 1 or 2"),
        ({"ulysses": True}, "ulysses is True"),
        ({"ring": "2"}, "ring is '2'; it must be"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, problem) -> None:
    with pytest.raises(RequestError) as caught:
        Grid(**sizes)
    assert problem in caught.value.message


@pytest.mark.parametrize("tokens", [1, 7, 8, 29, 75600])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_slices_are_as_even_as_can_be_and_the_longer_come_first(tokens, shards) -> None:
    lengths = shard_lengths(tokens, shards)
    assert (len(lengths), sum(lengths)) == (shards, tokens)
    assert max(lengths) - min(lengths) <= 1 and list(lengths) == sorted(lengths, reverse=True)


def test_a_rank_has_some_heads_and_a_ring_needs_lse() -> None:
    assert Grid(ulysses=3).local(SELF) == SELF.replace(num_heads=4, num_kv_heads=4)
    assert Grid(ring=2).local(SELF) == SELF.replace(needs_lse=True, equal_lengths=False)
    for alike in (CROSS, TEXT):
        assert Grid(ulysses=2, ring=2).local(alike) == alike
    assert Grid(cfg=2).local(SELF) == SELF


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 7, 12])
def test_every_grid_of_so_many_ranks_is_there_once(num_ranks) -> None:
    grids = grids_of(num_ranks)
    numbers = range(1, num_ranks + 1)
    product = {(u, r, c) for u in numbers for r in numbers for c in (1, 2) if u * r * c == num_ranks}
    assert {(grid.ulysses, grid.ring, grid.cfg) for grid in grids} == product
    assert len(grids) == len(product)


def test_what_fits_is_not_refused() -> None:
    for grid in (Grid(), Grid(ulysses=12), Grid(ulysses=3, ring=10), Grid(ulysses=2, ring=5, cfg=2)):
        check_grid(grid, [SELF, CROSS, TEXT], VIDEO)


@pytest.mark.parametrize(
    ("grid", "need", "problem"),
    [
        (Grid(ulysses=5), SELF, "transformer.self has 12 heads, which ulysses 5 doesn't divide"),
        (Grid(ulysses=4), SELF.replace(num_kv_heads=2), "has 2 key and value heads, which ulysses 4 doesn't divide"),
        (Grid(ring=31), SELF, "transformer.self has 30 tokens for 31 ranks"),
        (Grid(ring=2), SELF.replace(role="cross"), "transformer.cross doesn't say that every rank has its keys"),
        (Grid(ring=2), SELF.replace(mask="dense"), "has a mask for every query and key (dense), which isn't split"),
        (Grid(ulysses=2), SELF.replace(mask="bias"), "has a mask for every query and key (bias), which isn't split"),
        (Grid(ulysses=2), CROSS.replace(mask="dense"), "has a mask for every query and key (dense)"),
        (Grid(ring=2), SELF.replace(packed_varlen=True), "has packed documents, which aren't split by a ring"),
        (Grid(ulysses=2), CROSS.replace(packed_varlen=True), "packed documents, which are on every rank as a whole"),
        (Grid(ulysses=2), SELF.replace(needs_lse=True), "transformer.self gives its log-sum-exp, which isn't gathered"),
    ],
)
def test_what_is_not_split_is_refused(grid, need, problem) -> None:
    assert problem in refused(grid, need, sequences=VIDEO).message
    check_grid(Grid(cfg=2), [need], VIDEO)  # which splits no sequence


def test_packed_documents_are_split_by_heads() -> None:
    check_grid(Grid(ulysses=2), [SELF.replace(packed_varlen=True)], VIDEO)


def test_one_branch_is_not_split() -> None:
    one = {"transformer": SharedSequence(rows=1, tokens=30, channels=64)}
    error = refused(Grid(ulysses=2, cfg=2), SELF, sequences=one)
    assert "one guidance branch (a guidance scale above 1 makes two), which cfg_parallel 2 doesn't split" in str(error)
    assert error.details["would_do"] and all(grid["cfg"] == 1 for grid in error.details["would_do"])


def test_the_grids_that_would_work_are_of_as_many_ranks_or_of_the_most_that_do() -> None:
    same = refused(Grid(ulysses=8), SELF, sequences=VIDEO).details["would_do"]
    assert [(grid["ulysses"], grid["ring"], grid["cfg"]) for grid in same] == [
        *((4, 2, 1), (2, 4, 1), (1, 8, 1)),
        *((4, 1, 2), (2, 2, 2), (1, 4, 2)),
    ]
    fewer = refused(Grid(ring=10**9), SELF, sequences=VIDEO)
    assert "with 60 ranks these work: cfg_parallel 2 x ulysses 6 x ring 5" in fewer.message
    assert "no grid works" not in refused(Grid(ring=3), SELF.replace(role="cross")).message
