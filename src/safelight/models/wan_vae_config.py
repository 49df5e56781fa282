"""WanVaeConfig: what a Wan VAE's config.json says, readable without torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from safelight.attention.requirements import AttentionRequirements
from safelight.errors import CheckpointError

# Wan 2.1's latent statistics, which a config.json may leave out.
_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)

_COUNTS = ("base_dim", "z_dim", "num_res_blocks", "in_channels", "out_channels")
_OPTIONAL_COUNTS = ("decoder_base_dim", "patch_size", "scale_factor_temporal", "scale_factor_spatial")
_NUMBER_LISTS = ("attn_scales", "latents_mean", "latents_std")


@dataclass(frozen=True, kw_only=True)
class WanVaeConfig:
    """A Wan VAE's shape and latent statistics, with the names and defaults (Wan 2.1) of diffusers' AutoencoderKLWan.

    `is_residual` is Wan 2.2's form, which comes with `patch_size` 2. `temperal_downsample`, the files' spelling, is in
    the encoder's order. `attn_scales` and `dropout` don't concern a decoder. The scale factors are None where the file
    doesn't state them: `spatial_factor` and `temporal_factor` are what the architecture does.
    """

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    dropout: float = 0.0
    latents_mean: tuple[float, ...] = _MEAN
    latents_std: tuple[float, ...] = _STD
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_temporal: int | None = None
    scale_factor_spatial: int | None = None

    @classmethod
    def from_json(cls, config: Mapping[str, Any], source: str = "vae/config.json") -> Self:
        """Read a parsed config.json; keys that begin with "_" are the writer's notes.

        Raises CheckpointError that starts with `source` and lists everything wrong at once: keys that a Wan VAE doesn't
        have, values of the wrong kind, or values that contradict each other.
        """
        given = {key: value for key, value in config.items() if not key.startswith("_")}
        known = [field.name for field in dataclasses.fields(cls)]
        problems = _problems(given, known)
        if not problems:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
            read = cls(**values)
            problems = _contradictions(read)
            if not problems:
                return read
        raise CheckpointError(f"{source}: " + "; ".join(problems), file=source)

    @property
    def patch(self) -> int:
        """Edge of the square of pixels that one position of the last convolution's output holds."""
        return self.patch_size or 1

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent position, along height and along width."""
        return int(2 ** (len(self.dim_mult) - 1)) * self.patch

    @property
    def temporal_factor(self) -> int:
        """Frames per latent frame, but for the first latent frame, which is one frame."""
        return int(2 ** sum(self.temperal_downsample))

    @property
    def image_channels(self) -> int:
        """Channels of a decoded frame."""
        return self.out_channels // self.patch**2

    @property
    def temporal_upsample(self) -> tuple[bool, ...]:
        """Whether a decoder stage doubles the frames; for each stage but the last, which upsamples nothing."""
        return self.temperal_downsample[::-1]

    @property
    def decoder_stages(self) -> tuple[tuple[int, int], ...]:
        """Channels into and out of each decoder stage's residual blocks."""
        base = self.decoder_base_dim or self.base_dim
        widths = [base * multiple for multiple in reversed(self.dim_mult)]
        # Wan 2.1's upsampling halves the channels, so that every stage but the first begins with half.
        halving = 1 if self.is_residual else 2
        begins = [widths[0], *(width // halving for width in widths)]
        return tuple(zip(begins[: len(widths)], widths, strict=True))

    def attention_requirements(self, dtype: str) -> AttentionRequirements:
        """What the decoder's one attention layer asks of a kernel when the decoder runs in `dtype`."""
        return AttentionRequirements(
            head_dim=self.decoder_stages[0][0],
            dtype=dtype,
            num_heads=1,
            num_kv_heads=1,
            role="self",
            component="vae",
            is_auxiliary=True,
            equal_lengths=True,
        )


def _problems(given: Mapping[str, Any], known: list[str]) -> list[str]:
    """Keys that aren't ours, and values that aren't of their key's kind."""
    problems: list[str] = []
    unknown = sorted(given.keys() - set(known))
    if unknown:
        problems.append(f"a Wan VAE (AutoencoderKLWan) has no {', '.join(unknown)}; it has {', '.join(known)}")
    for name, value in given.items():
        if name in _COUNTS or name in _OPTIONAL_COUNTS:
            is_right = _is_count(value) or (value is None and name in _OPTIONAL_COUNTS)
            wanted = "a whole number of at least 1" + (" or null" if name in _OPTIONAL_COUNTS else "")
        elif name == "dim_mult":
            is_right = isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_count, value))
            wanted = "a list of whole numbers of at least 1"
        elif name == "temperal_downsample":
            is_right = isinstance(value, list | tuple) and all(type(item) is bool for item in value)
            wanted = "a list of true and false"
        elif name in _NUMBER_LISTS:
            is_right = isinstance(value, list | tuple) and all(type(item) in (int, float) for item in value)
            wanted = "a list of numbers"
        elif name == "is_residual":
            is_right, wanted = type(value) is bool, "true or false"
        elif name == "dropout":
            is_right, wanted = type(value) in (int, float), "a number"
        else:
            continue
        if not is_right:
            problems.append(f"{name} is {value!r}; it must be {wanted}")
    return problems


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _contradictions(config: WanVaeConfig) -> list[str]:
    """Values that can't hold together."""
    problems: list[str] = []
    num_steps = len(config.dim_mult) - 1
    if len(config.temperal_downsample) != num_steps:
        problems.append(
            f"temperal_downsample has {len(config.temperal_downsample)} entries; with {num_steps + 1} in dim_mult it "
            f"must have {num_steps}"
        )
    for name, values in (("latents_mean", config.latents_mean), ("latents_std", config.latents_std)):
        if len(values) != config.z_dim:
            problems.append(f"{name} has {len(values)} entries; with z_dim {config.z_dim} it must have as many")
    if config.out_channels % config.patch**2:
        problems.append(
            f"out_channels is {config.out_channels}; with patch_size {config.patch} it must be a multiple of "
            f"{config.patch**2}"
        )
    if problems:
        return problems
    if config.is_residual:
        for (begin, end), is_temporal in zip(config.decoder_stages, config.temporal_upsample, strict=False):
            copies = 8 if is_temporal else 4
            if end * copies % begin:
                problems.append(f"a decoder stage from {begin} to {end} channels can't pass its input on x{copies}")
    for name, stated, factor in (
        ("scale_factor_spatial", config.scale_factor_spatial, config.spatial_factor),
        ("scale_factor_temporal", config.scale_factor_temporal, config.temporal_factor),
    ):
        if stated is not None and stated != factor:
            problems.append(f"{name} is {stated}; dim_mult, temperal_downsample and patch_size make it {factor}")
    return problems
