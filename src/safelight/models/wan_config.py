"""WanConfig: the shape of a Wan transformer and what its attention layers require. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from safelight.attention.plan import LayerGroup
from safelight.attention.requirements import AttentionRequirements
from safelight.errors import CheckpointError

_REQUIRED = (
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "text_dim",
    "freq_dim",
    "ffn_dim",
    "num_layers",
)


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """A Wan transformer's configuration, with the names that diffusers' WanTransformer3DModel uses."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int
    attention_head_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    ffn_dim: int
    num_layers: int
    cross_attn_norm: bool = True
    eps: float = 1e-6

    @property
    def dim(self) -> int:
        """The hidden size."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def rotary_axes(self) -> tuple[int, int, int]:
        """How head_dim is shared between time, height and width."""
        space = 2 * (self.attention_head_dim // 6)
        return (self.attention_head_dim - 2 * space, space, space)

    @classmethod
    def from_json(cls, config: Mapping[str, Any], where: str = "transformer/config.json") -> Self:
        """Read a diffusers configuration. Raises CheckpointError for what text-to-video Wan doesn't have."""
        missing = [key for key in _REQUIRED if config.get(key) is None and key != "out_channels"]
        if missing:
            raise CheckpointError(f"{where}: {', '.join(missing)} missing; a WanTransformer3DModel config has them")
        for key, allowed in (("image_dim", None), ("added_kv_proj_dim", None), ("qk_norm", "rms_norm_across_heads")):
            found = config.get(key, allowed)
            if found != allowed:
                raise CheckpointError(f"{where}: {key} is {found!r}; text-to-video Wan has {allowed!r}")
        values = {key: config[key] for key in (*_REQUIRED, "cross_attn_norm", "eps") if key in config}
        values["out_channels"] = config.get("out_channels") or config["in_channels"]
        return cls(patch_size=tuple(config.get("patch_size", (1, 2, 2))), **values)

    def attention_groups(self, dtype: str, component: str = "transformer") -> tuple[LayerGroup, LayerGroup]:
        """What the self- and cross-attention layers require, in the order of their declaration."""
        base = AttentionRequirements(
            head_dim=self.attention_head_dim,
            dtype=dtype,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_heads,
            component=component,
        )
        return (
            LayerGroup(requirements=base.replace(role="self", equal_lengths=True), count=self.num_layers),
            LayerGroup(requirements=base.replace(role="cross"), count=self.num_layers),
        )
