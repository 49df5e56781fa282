"""AttentionBackend: a kernel's declaration. It says what the kernel can do; `load` alone touches the vendor's package.

A file in `attention/backends/` holds one declaration named BACKEND and imports neither torch nor a vendor's package.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from safelight.attention.requirements import AttentionRequirements, Mask
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

if TYPE_CHECKING:
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

    `grid` is the token grid (t, h, w); `text` the half-open range of text tokens, if joint; `offsets` int32 cumulative
    lengths of packed documents; `step` and `layer`, from 0, say where the call stands in the run.
    """

    grid: tuple[int, int, int] | None = None
    text: tuple[int, int] | None = None
    offsets: "Tensor | None" = None
    step: int | None = None
    layer: int | None = None


class AttentionFn(Protocol):
    """A bound kernel: q, k, v and the output are [batch, seq, heads, head_dim].

    `mask` is one of AttentionRequirements' forms, told apart by shape and dtype; True means "attend", and a row with
    nothing to attend to gives zeros. `scale` None means head_dim ** -0.5. Causal with unequal lengths is aligned at
    the bottom right. A kernel bound for a layer with `needs_lse` returns (out, lse), lse float32 [batch, heads, seq],
    natural logarithm, -inf for an empty row.
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
