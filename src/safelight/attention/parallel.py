"""Attention over a sequence that several ranks hold in slices: a kernel for one device in, one for all of them out.

Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509) exchanges tokens for heads before the kernel and
back after it. Ring attention (Liu et al. 2023, arXiv 2310.01889) passes blocks of keys and values round and merges what
the kernel gives for each. Together they make a grid (Fang and Zhao 2024, "USP", arXiv 2405.07719): a ring of Ulysses
groups, each of which exchanges before and after its turns.

Shapes: B batch, N tokens of this rank's slice, M tokens after Ulysses' exchange, T tokens that every rank has (text in
joint attention), H query heads, K key and value heads, D head_dim, U and R the sizes of the two groups.

The layout that these functions get is that of the whole sequence: `shards` says how many of its own tokens each rank
holds, `text` where those are that every rank has, at the start or at the end. A key-padding mask is one of all keys, in
the order of the sequence. Tokens that every rank has are attended to once, and come out alike on every rank; with a
ring but for the rounding of sums, which each rank makes in an order of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from safelight.attention.backend import AttentionFn, Layout
from safelight.attention.grid import is_sharded
from safelight.attention.merging import merge_attention
from safelight.attention.requirements import AttentionRequirements


class Link(Protocol):
    """A group of ranks that exchange tensors. Every rank of it makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's place in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        ...

    def exchange(self, send: Tensor, send_lengths: Sequence[int], receive_lengths: Sequence[int]) -> Tensor:
        """All to all: parts of `send` along its first dimension for each rank; gives what came from each, joined."""
        ...

    def pass_on(self, send: Tensor, receive: Tensor) -> Callable[[], None]:
        """Start sending to the next rank, and receiving what the one before sends; calling the result waits for both.

        Neither tensor may be touched in between; both are contiguous.
        """
        ...


def over_ranks(kernel: AttentionFn, need: AttentionRequirements, ulysses_link: Link, ring_link: Link) -> AttentionFn:
    """The kernel of a layer for a run on several ranks: `need` is what the layer asks for in one process."""
    if is_sharded(need):
        return sequence_parallel(kernel, ulysses_link, ring_link)
    if need.causal and not need.is_auxiliary:
        return causal_slice(kernel, ring_link.rank * ulysses_link.size + ulysses_link.rank)
    return kernel


def sequence_parallel(kernel: AttentionFn, ulysses_link: Link, ring_link: Link) -> AttentionFn:
    """The kernel over a sequence in slices, on a grid of the two groups.

    `kernel` is bound for what `Grid.local` says; with a ring it returns (out, lse).
    """
    inner = kernel if ring_link.size == 1 else ring(kernel, ring_link)
    return inner if ulysses_link.size == 1 else ulysses(inner, ulysses_link, ring_link.rank)


def ulysses(kernel: AttentionFn, link: Link, group: int = 0) -> AttentionFn:
    """The kernel with tokens exchanged for heads: each rank has some of the heads attend to all of its group's tokens.

    `group` is which of the Ulysses groups this one is, in the order of the sequence. A call makes two exchanges: one of
    queries, keys and values together, one of the output. The kernel gets the layout with the shards of groups, or, of a
    single one, that of the whole sequence.
    """
    size = link.size

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        assert layout is not None, "nothing says which rank holds what"
        shards, text, is_first = _slices(layout)
        mine = shards[group * size : (group + 1) * size]
        batch, head_dim = q.shape[0], q.shape[3]
        heads, kv_heads = q.shape[2] // size, k.shape[2] // size
        here = slice(text, None) if is_first else slice(0, q.shape[1] - text)

        # For each rank, its heads of my tokens: [U, N, B, heads + 2 kv_heads, D]. Tokens come first, so that what
        # arrives is one sequence as it lies.
        parts = [x[:, here].unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4) for x in (q, k, v)]
        sent = torch.cat(parts, dim=3).flatten(0, 1)
        received = link.exchange(sent, [mine[link.rank]] * size, mine).transpose(0, 1)
        own = received.split([heads, kv_heads, kv_heads], dim=2)
        if text:
            # Everybody has those tokens: of them each takes its heads.
            at = slice(0, text) if is_first else slice(q.shape[1] - text, None)
            texts = [x[:, at].unflatten(2, (size, -1))[:, :, link.rank] for x in (q, k, v)]
            own = [torch.cat((t, x) if is_first else (x, t), dim=1) for t, x in zip(texts, own, strict=True)]
        groups = tuple(sum(shards[i : i + size]) for i in range(0, len(shards), size))
        layout = layout.with_shards(groups if len(groups) > 1 else None)
        out = kernel(*own, scale=scale, causal=causal, mask=mask, layout=layout)

        # Back: every rank gets its tokens, and all of the text, from each of the heads: [U, N + T, B, heads, D].
        texts_out = out[:, :text] if is_first else out[:, out.shape[1] - text :]
        tokens = (out[:, text:] if is_first else out[:, : out.shape[1] - text]).split(list(mine), dim=1)
        pieces = [p for x in tokens for p in ((texts_out, x) if is_first else (x, texts_out))] if text else [*tokens]
        sent = torch.cat([piece.transpose(0, 1) for piece in pieces])
        received = link.exchange(sent, [n + text for n in mine], [mine[link.rank] + text] * size)
        result: Tensor = received.view(size, -1, batch, heads, head_dim).permute(2, 1, 0, 3, 4).flatten(2, 3)
        return result

    return attend


def ring(kernel: AttentionFn, link: Link) -> AttentionFn:
    """The kernel over blocks of keys and values that go round: each rank's queries meet one block after another.

    While a block is attended to, the next one is on its way. `kernel` returns (out, lse); the merged output is made in
    float32, or wider, and given in the inputs' dtype. The kernel gets no more of the layout than step and layer.
    """
    size, rank = link.size, link.rank

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        assert layout is not None, "nothing says which rank holds what"
        blocks, text, is_first = _slices(layout)
        length = k.shape[1] - text
        here = slice(text, None) if is_first else slice(0, length)
        starts = [(text if is_first else 0) + sum(blocks[:i]) for i in range(size)]
        inner = Layout(step=layout.step, layer=layout.layer)

        def attend_to(keys: Tensor, values: Tensor, rows: slice, block: int, **how: Any) -> tuple[Tensor, Tensor]:
            columns = None
            if mask is not None:
                columns = mask[:, starts[block] : starts[block] + blocks[block]]
                if block == rank and text:
                    # The text's keys are attended to here and in no other turn.
                    texts = mask[:, :text] if is_first else mask[:, mask.shape[1] - text :]
                    columns = torch.cat((texts, columns) if is_first else (columns, texts), dim=1)
            result: tuple[Tensor, Tensor] = kernel(q[:, rows], keys, values, scale=scale, mask=columns, **how)
            return result

        sent = torch.stack((k[:, here], v[:, here]))
        out, lse = q.new_empty(0), q.new_empty(0)
        for turn in range(size):
            block = (rank - turn) % size
            is_last = turn == size - 1
            received = sent.new_empty((2, q.shape[0], 0 if is_last else blocks[(block - 1) % size], *k.shape[2:]))
            wait = None if is_last else link.pass_on(sent, received)
            if turn == 0:
                out, lse = attend_to(k, v, slice(None), block, causal=causal, layout=inner)
                out = out.to(torch.promote_types(out.dtype, torch.float32))
            else:
                rows = _rows_that_see(block, rank, length, text, causal=causal, is_first=is_first)
                if rows is not None:
                    other, other_lse = attend_to(sent[0], sent[1], rows, block, causal=False, layout=inner)
                    merged, merged_lse = merge_attention(out[:, rows], lse[:, :, rows], other, other_lse)
                    if rows == slice(None):
                        out, lse = merged, merged_lse
                    else:
                        out[:, rows], lse[:, :, rows] = merged, merged_lse
            if wait is not None:
                wait()
                sent = received
        return out.to(q.dtype)

    return attend


def causal_slice(kernel: AttentionFn, place: int) -> AttentionFn:
    """A causal kernel for a slice of the queries where every rank has all keys: it is given those up to its last query.

    `place` is the rank's among those that share the sequence.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Any:
        if causal and layout is not None and layout.shards is not None:
            # Aligned at the bottom right: the last of all queries sees every key.
            last = max(0, sum(layout.shards[:place]) + q.shape[1] + k.shape[1] - sum(layout.shards))
            k, v = k[:, :last], v[:, :last]
            mask = None if mask is None else mask[..., :last]
        return kernel(q, k, v, scale=scale, causal=causal, mask=mask, layout=layout)

    return attend


def _slices(layout: Layout) -> tuple[Sequence[int], int, bool]:
    """The shards, how many tokens every rank has, and whether those come first."""
    assert layout.shards is not None, "nothing says which rank holds what"
    if layout.text is None:
        return layout.shards, 0, True
    start, end = layout.text
    assert start in (0, sum(layout.shards)), "text is at the start of the sequence, or at its end"
    return layout.shards, end - start, start == 0


def _rows_that_see(block: int, rank: int, length: int, text: int, *, causal: bool, is_first: bool) -> slice | None:
    """Which of this rank's queries see another rank's block: all, none, or those of the slice or of the text alone.

    With causal, a token sees the blocks before its own; text at the start sees none of them, text at the end every one.
    """
    if not causal:
        return slice(None)
    if is_first:
        return None if block > rank else slice(text, None)
    if block < rank:
        return slice(None)
    return slice(length, None) if text else None
