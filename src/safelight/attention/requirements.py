"""AttentionRequirements: what one attention layer asks of a kernel."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Role = Literal["self", "cross", "joint"]
Mask = Literal["none", "key_padding", "dense", "bias"]

ROLES: tuple[Role, ...] = ("self", "cross", "joint")
MASKS: tuple[Mask, ...] = ("none", "key_padding", "dense", "bias")


@dataclass(frozen=True, kw_only=True)
class AttentionRequirements:
    """What one layer asks of a kernel. Equal requirements get equal selections.

    `dtype` is a torch dtype's name ("bfloat16"). `mask` is the strongest mask the layer passes: "key_padding" is bool
    [batch, keys], "dense" bool [batch, heads, queries, keys], "bias" the additive form of it. `scale` None means
    head_dim ** -0.5. `equal_lengths` says that queries and keys are known to be equally many; `replicated_keys` that
    every rank of a sequence-parallel run holds all keys and values, so that the layer needs no collective. An auxiliary
    layer (text encoder, VAE, refiner) isn't part of the denoising transformer, and a global choice is only a wish
    there.
    """

    head_dim: int
    dtype: str
    num_heads: int
    num_kv_heads: int
    role: Role = "self"
    component: str = "transformer"
    is_auxiliary: bool = False
    causal: bool = False
    mask: Mask = "none"
    packed_varlen: bool = False
    needs_lse: bool = False
    scale: float | None = None
    equal_lengths: bool = False
    replicated_keys: bool = False

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The requirements as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(**data)
