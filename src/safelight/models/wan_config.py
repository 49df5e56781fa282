"""WanConfig: the shape of a Wan transformer and what its attention layers require. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from safelight.attention.plan import LayerGroup
from safelight.attention.requirements import AttentionRequirements
from safelight.errors import CheckpointError

_COUNTS = (
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "text_dim",
    "freq_dim",
    "ffn_dim",
    "num_layers",
)
# What a text-to-video transformer has in place of what image-to-video and older ones bring.
_FIXED: Mapping[str, object] = {"image_dim": None, "added_kv_proj_dim": None, "qk_norm": "rms_norm_across_heads"}


@dataclass(frozen=True, kw_only=True)
class WanConfig:
    """A Wan transformer's configuration, with the names that diffusers' WanTransformer3DModel uses.

    `rope_max_seq_len` is how many tokens an axis can have.
    """

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
    rope_max_seq_len: int = 1024

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
    def from_json(cls, config: Mapping[str, Any], source: str = "transformer/config.json") -> Self:
        """Read a parsed config.json; keys that don't shape a text-to-video transformer are ignored.

        Raises CheckpointError that starts with `source` and lists everything wrong at once.
        """
        problems = _problems(config)
        if problems:
            raise CheckpointError(f"{source}: " + "; ".join(problems), file=source)
        optional = ("cross_attn_norm", "eps", "rope_max_seq_len")
        return cls(
            **{name: config[name] for name in (*_COUNTS, *optional) if name in config},
            # diffusers writes null where the output has the input's channels.
            out_channels=config.get("out_channels") or config["in_channels"],
            patch_size=tuple(config.get("patch_size", cls.patch_size)),
        )

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
            LayerGroup(requirements=base.replace(role="cross", replicated_keys=True), count=self.num_layers),
        )


def _problems(config: Mapping[str, Any]) -> list[str]:
    """Everything that stops a config.json from describing a transformer we can build."""
    problems = [f"{name} is missing" for name in _COUNTS if name not in config]
    for name in (*_COUNTS, "rope_max_seq_len"):
        if name in config and not _is_count(config[name]):
            problems.append(f"{name} is {config[name]!r}; it must be a whole number of at least 1")
    for name in ("attention_head_dim", "freq_dim"):
        if _is_count(config.get(name)) and config[name] % 2:
            problems.append(f"{name} is {config[name]}; it must be even")
    out_channels = config.get("out_channels")
    if out_channels is not None and not _is_count(out_channels):
        problems.append(f"out_channels is {out_channels!r}; it must be a whole number of at least 1, or null")
    patch = config.get("patch_size", (1, 2, 2))
    if not (isinstance(patch, list | tuple) and len(patch) == 3 and all(map(_is_count, patch))):
        problems.append(f"patch_size is {patch!r}; it must be three whole numbers of at least 1")
    epsilon = config.get("eps", 1e-6)
    if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
        problems.append(f"eps is {epsilon!r}; it must be a number between 0 and 1")
    norm = config.get("cross_attn_norm", True)
    if type(norm) is not bool:
        problems.append(f"cross_attn_norm is {norm!r}; it must be true or false")
    for name, right in _FIXED.items():
        if config.get(name, right) != right:
            problems.append(f"{name} is {config[name]!r}; text-to-video Wan has {right!r}")
    return problems


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
