"""Umt5Config: what a UMT5 text encoder's config.json says, readable without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from safelight.attention.requirements import AttentionRequirements
from safelight.errors import CheckpointError

# feed_forward_proj -> (is it gated, transformers' name of its activation)
FEED_FORWARDS: Mapping[str, tuple[bool, str]] = {"gated-gelu": (True, "gelu_new"), "relu": (False, "relu")}

_WHOLE_NUMBERS = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_heads",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
)


@dataclass(frozen=True, kw_only=True)
class Umt5Config:
    """A UMT5 encoder's shape; names are those of transformers' UMT5Config.

    `d_kv` is the head dimension; `num_heads * d_kv` need not be `d_model`. `feed_forward_proj` is "gated-gelu" or
    "relu". The token embedding is always tied, whatever the file says.
    """

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    layer_norm_epsilon: float
    feed_forward_proj: str

    @classmethod
    def from_json(cls, config: Mapping[str, Any], source: str = "text_encoder/config.json") -> Self:
        """Read a parsed config.json; keys that don't shape the encoder are ignored.

        Raises CheckpointError that starts with `source` and lists everything wrong at once.
        """
        problems = _problems(config)
        if problems:
            raise CheckpointError(f"{source}: " + "; ".join(problems), file=source)
        return cls(
            **{name: config[name] for name in _WHOLE_NUMBERS},
            layer_norm_epsilon=float(config["layer_norm_epsilon"]),
            feed_forward_proj=config["feed_forward_proj"],
        )

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward multiplies its activation with a second projection."""
        return FEED_FORWARDS[self.feed_forward_proj][0]

    def attention_requirements(self, dtype: str) -> AttentionRequirements:
        """What each of the `num_layers` attention layers asks of a kernel when the encoder runs in `dtype`."""
        return AttentionRequirements(
            head_dim=self.d_kv,
            dtype=dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            role="self",
            component="text_encoder",
            is_auxiliary=True,
            mask="bias",
            scale=1.0,
            equal_lengths=True,
        )


def _problems(config: Mapping[str, Any]) -> list[str]:
    """Everything that stops a config.json from describing an encoder we can build."""
    if config.get("model_type") != "umt5":
        return [f'model_type is {config.get("model_type")!r}; this text encoder must be "umt5"']
    problems: list[str] = []
    for name in (*_WHOLE_NUMBERS, "layer_norm_epsilon", "feed_forward_proj"):
        if name not in config:
            problems.append(f"{name} is missing")
        elif name in _WHOLE_NUMBERS and (type(config[name]) is not int or config[name] < 1):
            problems.append(f"{name} is {config[name]!r}; it must be a whole number of at least 1")
    epsilon = config.get("layer_norm_epsilon", 1e-6)
    if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
        problems.append(f"layer_norm_epsilon is {epsilon!r}; it must be a number between 0 and 1")
    projection = config.get("feed_forward_proj", "relu")
    if not isinstance(projection, str) or projection not in FEED_FORWARDS:
        problems.append(f"feed_forward_proj is {projection!r}; it must be one of {sorted(FEED_FORWARDS)}")
    if problems:
        return problems

    # A quarter of the buckets are exact distances; the logarithmic ones begin there and must have room to grow.
    num_buckets, max_distance = config["relative_attention_num_buckets"], config["relative_attention_max_distance"]
    if num_buckets < 4:
        problems.append(f"relative_attention_num_buckets is {num_buckets}; it must be at least 4")
    elif max_distance <= num_buckets // 4:
        problems.append(
            f"relative_attention_max_distance is {max_distance}; with {num_buckets} buckets it must be above "
            f"{num_buckets // 4}"
        )
    is_gated, activation = FEED_FORWARDS[projection]
    # What transformers derives or fixes; a file that says otherwise describes another model.
    for name, right in (("is_gated_act", is_gated), ("dense_act_fn", activation), ("is_decoder", False)):
        if config.get(name, right) != right:
            problems.append(f"{name} is {config[name]!r}; with feed_forward_proj {projection!r} it must be {right!r}")
    return problems
