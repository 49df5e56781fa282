"""The cases every kernel is held to, made from its declaration. Imports no torch: a case is data.

Each case asks for something that a declaration can promise. A kernel that promises it runs the case and has to equal
the reference; for one that doesn't, selection has to refuse the case's requirements.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from safelight.attention.backend import AttentionBackend
from safelight.attention.requirements import AttentionRequirements, Mask

Strides = Literal["heads first", "part of fused projections", "every other token", "features last but one"]

DTYPES = ("float64", "float32", "bfloat16", "float16")
HEAD_DIMS = (8, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512)
KEYS = (1, 63, 64, 65, 127, 128, 129, 193)
QUERIES = (1, 7, 64, 130)
CAUSAL_LENGTHS = ((5, 5), (64, 64), (3, 8), (8, 3), (1, 65), (65, 1), (63, 129), (129, 63))
STRIDES: tuple[Strides, ...] = (
    "heads first",
    "part of fused projections",
    "every other token",
    "features last but one",
)

# Every form in which a mask may come, by its kind. "empty" forms have rows with nothing to attend to.
MASK_FORMS: dict[str, Mask] = {
    "key padding": "key_padding",
    "key padding, a row of it empty": "key_padding",
    "dense": "dense",
    "dense for all heads": "dense",
    "dense for all rows": "dense",
    "dense, rows of it empty": "dense",
    "bias": "bias",
    "bias for all rows": "bias",
    "bias of keys": "bias",
    "bias with -inf": "bias",
    "bias, rows of it empty": "bias",
    "bias in float32": "bias",
}

DOCUMENTS: dict[str, tuple[tuple[int, int], ...]] = {
    "one document": ((9, 9),),
    "documents": ((5, 5), (1, 1), (33, 33), (7, 7)),
    "documents of a block and more": ((64, 64), (65, 65), (128, 128)),
    "documents with keys of their own": ((5, 8), (33, 2), (1, 65)),
    "documents, one without keys": ((5, 8), (3, 0), (4, 4)),
    "documents, one without anything": ((5, 5), (0, 0), (4, 4)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a kernel: what the layer requires, and what it is given.

    `documents` are the (queries, keys) of each packed document; `mask` is one of MASK_FORMS, "" none. With
    `opposed` the keys point away from the queries, so that a padded key of zeros would get all the weight. With
    `is_shared` one row's keys and values serve the whole batch, by a stride of zero. With `halves` the kernel is called
    on either half of the keys and the results are merged by their LSE.
    """

    name: str
    requirements: AttentionRequirements
    batch: int
    queries: int
    keys: int
    documents: tuple[tuple[int, int], ...] = ()
    mask: str = ""
    strides: Strides | None = None
    opposed: bool = False
    is_shared: bool = False
    halves: bool = False

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def capabilities(self) -> frozenset[str]:
        """What of a declaration the case exercises, in the words of `declared`."""
        need = self.requirements
        asked = {
            f"dtype {need.dtype}": True,
            f"mask {need.mask}": True,
            "grouped-query": need.num_heads != need.num_kv_heads,
            "causal": need.causal,
            "packed varlen": need.packed_varlen,
            "LSE": need.needs_lse,
            "scale": need.scale is not None and need.scale != need.head_dim**-0.5,
            "cross lengths": not need.equal_lengths,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)


def declared(backend: AttentionBackend) -> frozenset[str]:
    """The capabilities that a declaration promises."""
    promised = {
        "grouped-query": backend.grouped_query,
        "causal": backend.causal,
        "packed varlen": backend.packed_varlen,
        "LSE": backend.lse,
        "scale": backend.custom_scale,
        "cross lengths": backend.cross_lengths,
    }
    names = {name for name, is_promised in promised.items() if is_promised}
    return frozenset({*names, *(f"dtype {d}" for d in backend.dtypes), *(f"mask {m}" for m in backend.masks)})


def cases(backend: AttentionBackend, dtypes: tuple[str, ...] | None = None) -> tuple[Case, ...]:
    """All cases in a form that suits the backend: in a dtype and a head_dim that it takes.

    `dtypes` limits them to some of its dtypes; by default most cases are in one of them, the widest, and a few in all
    that there are. Names are unique. Which of the cases the backend has promised, selection says.
    """
    made: dict[str, Case] = {}
    for dtype in dtypes or (next(dtype for dtype in DTYPES[1:] if dtype in backend.dtypes),):
        for case in _cases(_head_dim(backend), dtype):
            made[case.name] = case
    if dtypes is None:
        for case in _in_every_dtype(_head_dim(backend)):
            made[case.name] = case
    return tuple(made.values())


def _head_dim(backend: AttentionBackend) -> int:
    preferred = (64, *HEAD_DIMS)
    return next(size for size in preferred if backend.head_dims is None or backend.head_dims(size))


def _case(
    name: str,
    head_dim: int,
    dtype: str,
    *,
    batch: int = 2,
    lengths: tuple[int, int] = (9, 9),
    heads: tuple[int, int] = (2, 2),
    documents: tuple[tuple[int, int], ...] = (),
    mask: str = "",
    causal: bool = False,
    scale: float | None = None,
    lse: bool = False,
    joint: bool = False,
    **how: Any,
) -> Case:
    if documents:
        batch, lengths = 1, (sum(queries for queries, _ in documents), sum(keys for _, keys in documents))
    is_equal = all(queries == keys for queries, keys in documents or (lengths,))
    return Case(
        name=f"{name} in {dtype}",
        requirements=AttentionRequirements(
            head_dim=head_dim,
            dtype=dtype,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            role="joint" if joint else "self" if is_equal else "cross",
            causal=causal,
            mask=MASK_FORMS[mask] if mask else "none",
            packed_varlen=bool(documents),
            needs_lse=lse,
            scale=scale,
            equal_lengths=is_equal,
        ),
        batch=batch,
        queries=lengths[0],
        keys=lengths[1],
        documents=documents,
        mask=mask,
        **how,
    )


def _in_every_dtype(head_dim: int) -> Iterator[Case]:
    for dtype in DTYPES:
        yield _case("plain", head_dim, dtype, batch=3, lengths=(33, 33))
        yield _case("with a scale", head_dim, dtype, scale=0.3)
        yield _case("causal", head_dim, dtype, causal=True)
        yield _case("key padding", head_dim, dtype, mask="key padding")
        yield _case("with LSE", head_dim, dtype, lse=True)
        yield _case("packed", head_dim, dtype, documents=DOCUMENTS["documents"])


def _cases(head_dim: int, dtype: str) -> Iterator[Case]:
    """All cases in one dtype; each of the generators below has one subject."""

    def case(name: str, *, size: int = head_dim, **how: Any) -> Case:
        return _case(name, size, dtype, **how)

    yield case("plain", batch=3, lengths=(33, 33))
    yield case("joint", lengths=(33, 33), joint=True)
    yield case("a long odd length", batch=1, lengths=(1111, 1111))
    for size in HEAD_DIMS:
        yield case(f"head_dim {size}", size=size, lengths=(17, 17))
        yield case(f"head_dim {size}, with a scale", size=size, scale=0.3)
        yield case(f"head_dim {size}, with LSE", size=size, lse=True)
    for scale in (1.0, 0.01):
        yield case(f"scale {scale}", scale=scale)
        yield case(f"scale {scale}, causal", scale=scale, causal=True)
        yield case(f"scale {scale}, with LSE", scale=scale, lse=True)
        yield case(f"scale {scale}, key padding", scale=scale, mask="key padding")
        yield case(f"scale {scale}, packed", scale=scale, documents=DOCUMENTS["documents"])
    yield from _heads(case)
    yield from _lengths(case)
    yield from _masks(case)
    yield from _packed(case)
    yield from _lse(case)
    for strides in STRIDES:
        yield case(f"strided, {strides}", batch=3, lengths=(9, 9), strides=strides)
        yield case(f"strided, {strides}, other lengths", batch=3, lengths=(7, 9), strides=strides)
        yield case(f"strided, {strides}, key padding", strides=strides, mask="key padding")
        yield case(f"strided, {strides}, packed", strides=strides, documents=DOCUMENTS["documents"])
        yield case(f"strided, {strides}, with LSE", strides=strides, lse=True)
    yield case("one row for the whole batch", batch=3, is_shared=True)


def _heads(case: Any) -> Iterator[Case]:
    for heads in ((4, 2), (6, 2), (4, 1)):
        name = f"{heads[0]} heads on {heads[1]}"
        yield case(name, heads=heads)
        yield case(f"{name}, other lengths", heads=heads, lengths=(7, 12))
        yield case(f"{name}, causal", heads=heads, causal=True)
        yield case(f"{name}, with LSE", heads=heads, lse=True)
        yield case(f"{name}, packed", heads=heads, documents=DOCUMENTS["documents"])
        for mask in ("key padding", "dense", "bias"):
            yield case(f"{name}, {mask}", heads=heads, mask=mask)


def _lengths(case: Any) -> Iterator[Case]:
    for queries in QUERIES:
        for keys in KEYS:
            yield case(f"{queries} queries on {keys} keys, opposed", lengths=(queries, keys), opposed=True)
            if queries == 7:
                masked = {"lengths": (queries, keys), "opposed": True, "mask": "key padding"}
                yield case(f"{queries} queries on {keys} keys, opposed, key padding", **masked)
    yield case("a text of 20 under 300 queries, key padding", lengths=(300, 20), mask="key padding")
    yield case("no queries", lengths=(0, 3))
    yield case("no queries, key padding", lengths=(0, 3), mask="key padding")
    yield case("no keys", lengths=(3, 0))
    yield case("no keys, causal", lengths=(3, 0), causal=True)
    for keys in KEYS:
        yield case(f"{keys} tokens, opposed", lengths=(keys, keys), opposed=True)
    for queries, keys in CAUSAL_LENGTHS:
        yield case(f"causal, {queries} queries on {keys} keys", lengths=(queries, keys), causal=True)


def _masks(case: Any) -> Iterator[Case]:
    for mask in MASK_FORMS:
        yield case(f"{mask}, as many keys", batch=3, mask=mask)
        yield case(f"{mask}, other lengths", batch=3, lengths=(5, 9), mask=mask)
        yield case(f"{mask}, a block and one", lengths=(64, 65), mask=mask)
        yield case(f"{mask}, causal", batch=3, mask=mask, causal=True)
        yield case(f"{mask}, causal, other lengths", batch=3, lengths=(5, 9), mask=mask, causal=True)
        yield case(f"{mask}, causal, fewer keys", batch=3, lengths=(9, 5), mask=mask, causal=True)


def _packed(case: Any) -> Iterator[Case]:
    for name, documents in DOCUMENTS.items():
        yield case(f"packed, {name}", documents=documents)
        yield case(f"packed, {name}, causal", documents=documents, causal=True)
        yield case(f"packed, {name}, with LSE", documents=documents, lse=True)
        yield case(f"packed, {name}, causal, with LSE", documents=documents, causal=True, lse=True)
    yield case("packed, opposed", documents=((5, 63), (7, 65), (64, 129)), opposed=True)
    yield case("packed, key padding", documents=DOCUMENTS["documents"], mask="key padding")


def _lse(case: Any) -> Iterator[Case]:
    for queries, keys in ((9, 9), (64, 64), (7, 12), (130, 65), (1, 193)):
        yield case(f"with LSE, {queries} queries on {keys} keys", lengths=(queries, keys), lse=True)
        halves = {"lengths": (queries, keys), "lse": True, "halves": True}
        yield case(f"with LSE, {queries} queries on {keys} keys, halves merged", **halves)
    yield case("with LSE, no queries", lengths=(0, 3), lse=True)
    yield case("with LSE, no keys", lengths=(3, 0), lse=True)
    for queries, keys in CAUSAL_LENGTHS:
        lengths = (queries, keys)
        yield case(f"with LSE, causal, {queries} queries on {keys} keys", lengths=lengths, causal=True, lse=True)
    for mask in MASK_FORMS:
        yield case(f"with LSE, {mask}", batch=3, mask=mask, lse=True)
        yield case(f"with LSE, {mask}, causal", batch=3, mask=mask, causal=True, lse=True)
        yield case(f"with LSE, {mask}, halves merged", batch=3, lengths=(5, 10), mask=mask, lse=True, halves=True)
