"""AttentionBackend: a kernel's declaration. It says what the kernel can do; `load` alone touches the vendor's package.

A file in `attention/backends/` holds one declaration named BACKEND and imports neither torch nor a vendor's package.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from safelight.attention.requirements import AttentionRequirements, Mask
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ReasonKind = Literal["unknown", "platform", "arch", "package", "scope", "capability", "policy"]


@dataclass(frozen=True)
class Reason:
    """Why a candidate was refused: a kind from rule S6, and the detail a person reads."""

    kind: ReasonKind
    detail: str


@dataclass(frozen=True)
class Layout:
    """Where the tokens are, made once per step: what sparse and packed kernels need.

    `grid` is the token grid (t, h, w); `text` the half-open range of text tokens, if joint. `offsets` are the int32
    cumulative lengths [documents + 1], from 0, of documents packed one after another in a batch of one; `key_offsets`
    those of their keys, None where keys are packed like queries. `step` and `layer`, from 0, say where the call stands
    in the run. `shards` are the numbers of tokens that the ranks of a parallel run hold, text left out, in the order of
    the sequence; all else here is of the whole sequence. None where one process has it all.
    """

    grid: tuple[int, int, int] | None = None
    text: tuple[int, int] | None = None
    offsets: "Tensor | None" = None
    step: int | None = None
    layer: int | None = None
    key_offsets: "Tensor | None" = None
    shards: tuple[int, ...] | None = None

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """`offsets` as numbers; the first use waits for the device."""
        assert self.offsets is not None, "nothing is packed"
        return tuple(self.offsets.tolist())

    @cached_property
    def key_starts(self) -> tuple[int, ...]:
        """`key_offsets` as numbers; the first use waits for the device."""
        return self.starts if self.key_offsets is None else tuple(self.key_offsets.tolist())

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys that a document has."""
        return _longest(self.starts), _longest(self.key_starts)

    def with_shards(self, shards: tuple[int, ...] | None) -> Self:
        """The same layout over other shards; what is known of the documents stays known."""
        other = dataclasses.replace(self, shards=shards)
        if self.offsets is not None:
            other.__dict__.update(starts=self.starts, key_starts=self.key_starts)
        return other

    @classmethod
    def of_documents(
        cls,
        lengths: Sequence[int],
        key_lengths: Sequence[int] | None = None,
        *,
        device: "torch.device | str | None" = None,
        **others: Any,
    ) -> Self:
        """The layout of packed documents with these numbers of queries, and of keys where those differ."""
        import torch

        starts = tuple(accumulate(lengths, initial=0))
        key_starts = starts if key_lengths is None else tuple(accumulate(key_lengths, initial=0))
        offsets = torch.tensor(starts, dtype=torch.int32, device=device)
        key_offsets = None if key_lengths is None else torch.tensor(key_starts, dtype=torch.int32, device=device)
        layout = cls(offsets=offsets, key_offsets=key_offsets, **others)
        # Known already: nothing has to wait for the device.
        layout.__dict__.update(starts=starts, key_starts=key_starts)
        return layout


def _longest(starts: Sequence[int]) -> int:
    return max((end - start for start, end in pairwise(starts)), default=0)


class AttentionFn(Protocol):
    """A bound kernel: q, k, v and the output are [batch, seq, heads, head_dim].

    `mask` is one of AttentionRequirements' forms, told apart by shape and dtype; True means "attend", and a row with
    nothing to attend to gives zeros. `scale` None means head_dim ** -0.5. Causal with unequal lengths is aligned at
    the bottom right. Where `layout` has offsets, the batch of one is packed: each document attends to itself alone,
    and causal is aligned in each. A kernel bound for a layer with `needs_lse` returns (out, lse), lse float32
    [batch, heads, seq], contiguous, natural logarithm, -inf for an empty row. The inputs come out unchanged.
    """

    def __call__(
        self,
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: "Tensor | None" = None,
        layout: Layout | None = None,
    ) -> Any:
        """Attend."""
        ...


def _nothing_more(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """A kernel's declaration.

    `platforms` empty means every platform; `arches` maps a platform to the architectures it has code for, and a
    platform that isn't named takes all. `package` is what the kernel comes in, None for torch itself; `env` the
    environment's switches that `why_not` reads from the facts. `head_dims` None means any. `why_not` adds reasons that
    a table can't say: a pure function of its arguments. `load` is given the requirements it will serve and returns the
    bound kernel; None means "adapter not built yet".
    """

    name: str
    summary: str
    load: Callable[[AttentionRequirements], AttentionFn] | None
    aliases: tuple[str, ...] = ()
    platforms: frozenset[str] = frozenset()
    arches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    package: Package | None = None
    env: tuple[str, ...] = ()
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16"})
    head_dims: Callable[[int], bool] | None = None
    head_dims_text: str = "any"
    masks: frozenset[Mask] = frozenset({"none"})
    grouped_query: bool = True
    causal: bool = True
    packed_varlen: bool = False
    lse: bool = False
    custom_scale: bool = True
    cross_lengths: bool = True
    deterministic: bool = True
    is_sparse: bool = False
    self_only: bool = False
    is_lossy: bool = False
    why_not: Callable[[AttentionRequirements, MachineFacts], tuple[Reason, ...]] = _nothing_more
