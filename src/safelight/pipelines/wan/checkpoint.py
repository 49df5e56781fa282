"""The Wan family's checkpoint: its configurations, defaults and limits. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safelight.attention.grid import SharedSequence
from safelight.attention.plan import LayerGroup
from safelight.errors import CheckpointError, RequestError
from safelight.models.umt5_config import Umt5Config
from safelight.models.wan_config import WanConfig
from safelight.models.wan_vae_config import WanVaeConfig
from safelight.pipelines import Configs, Lengths, Report
from safelight.request import Request, parse_fps, request_error
from safelight.sampling.guidance import branches
from safelight.sampling.schedulers import SCHEDULERS, check_scheduler
from safelight.weights.files import WeightFiles, find_weights, read_headers
from safelight.weights.model_index import ModelIndex
from safelight.weights.reading import read_json

if TYPE_CHECKING:
    from safelight.distributed.mesh import Mesh
    from safelight.pipelines.wan.pipeline import WanPipeline

# What a checkpoint may say of itself beside diffusers' files.
MANIFEST = "safelight.json"
TEXT_LENGTH = 512  # rows of text that Wan was trained to see
# Component -> the library and the classes that model_index.json may name; a tokenizer is what its own files say.
COMPONENTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tokenizer": ("transformers", ()),
    "text_encoder": ("transformers", ("UMT5EncoderModel",)),
    "transformer": ("diffusers", ("WanTransformer3DModel",)),
    "vae": ("diffusers", ("AutoencoderKLWan",)),
    "scheduler": ("diffusers", SCHEDULERS),
}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a request that leaves a field out gets; those of Wan 2.1 at 480p unless the checkpoint has its own."""

    width: int = 832
    height: int = 480
    num_frames: int = 81
    fps: Fraction = Fraction(16)
    num_steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    negative_prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class WanCheckpoint:
    """A Wan text-to-video model in diffusers' layout.

    Wan 2.2's large models have two transformers: the first one takes the noisy steps, whose timestep is `boundary` or
    more, and `transformer_2` those after them. Both fields are None where one transformer takes all.
    """

    folder: Path
    transformer: WanConfig
    transformer_2: WanConfig | None = None
    boundary: float | None = None
    text_encoder: Umt5Config
    vae: WanVaeConfig
    scheduler: Mapping[str, Any]
    files: Mapping[str, WeightFiles]
    defaults: Defaults
    trained_sizes: tuple[tuple[int, int], ...] = ()
    trained_max_frames: int | None = None

    @classmethod
    def open(cls, index: ModelIndex) -> Self:
        """Read every configuration and file header of a model. Raises CheckpointError that names file and key."""
        for component in COMPONENTS:
            index.folder(component)
        problems = _foreign_components(index)
        problems += _stage_problems(index)
        if problems:
            raise CheckpointError(f"{index.path}: {'; '.join(problems)}", path=str(index.path))
        root = index.path.parent

        def config(component: str, name: str = "config.json") -> tuple[dict[str, Any], str]:
            path = root / component / name
            return read_json(path), str(path)

        scheduler, where = config("scheduler", "scheduler_config.json")
        check_scheduler(scheduler, where)
        is_staged = "transformer_2" in index.components
        files = {
            "text_encoder": find_weights(root / "text_encoder", stem="model"),
            "transformer": find_weights(root / "transformer"),
            **({"transformer_2": find_weights(root / "transformer_2")} if is_staged else {}),
            "vae": find_weights(root / "vae"),
        }
        for component in files:
            read_headers(files[component])
        manifest = read_json(root / MANIFEST) if (root / MANIFEST).exists() else {}
        checkpoint = cls(
            folder=root,
            transformer=WanConfig.from_json(*config("transformer")),
            transformer_2=WanConfig.from_json(*config("transformer_2")) if is_staged else None,
            boundary=_boundary(index, scheduler) if is_staged else None,
            text_encoder=Umt5Config.from_json(*config("text_encoder")),
            vae=WanVaeConfig.from_json(*config("vae")),
            scheduler=scheduler,
            files=files,
            defaults=_defaults(manifest, root / MANIFEST),
            **_training(manifest, root / MANIFEST),
        )
        checkpoint._check_fit()
        return checkpoint

    def layer_groups(self, dtype: str) -> tuple[LayerGroup, ...]:
        """The attention layers of text encoder, transformers and VAE."""
        return _layer_groups(self.text_encoder, self.transformers, self.vae, dtype)

    @property
    def transformers(self) -> dict[str, WanConfig]:
        """The transformers' configurations by component, in the order in which a request meets them."""
        both = {"transformer": self.transformer, "transformer_2": self.transformer_2}
        return {component: config for component, config in both.items() if config is not None}

    def resolve(self, request: Request) -> Request:
        """The request with defaults filled in. Raises RequestError, with the nearest the model can do."""
        return _resolved(request, self.defaults, self.transformers, self.vae)

    def is_second_stage(self, timestep: float) -> bool:
        """Whether a step at this timestep is the second transformer's."""
        return self.boundary is not None and timestep < self.boundary

    def warnings(self, request: Request) -> tuple[str, ...]:
        """Where the request leaves what the model was trained for."""
        found = []
        assert request.width is not None and request.height is not None and request.num_frames is not None
        if self.trained_sizes and (request.width, request.height) not in self.trained_sizes:
            sizes = ", ".join(f"{width}x{height}" for width, height in self.trained_sizes)
            found.append(
                f"this model was trained at {sizes}; at {request.width}x{request.height} it may not draw what was asked"
            )
        if self.trained_max_frames is not None and request.num_frames > self.trained_max_frames:
            found.append(
                f"this model was trained on at most {self.trained_max_frames} frames; {request.num_frames} may not hold"
            )
        return tuple(found)

    def sequences(self, request: Request) -> dict[str, SharedSequence]:
        """What the ranks share of a resolved request: each transformer's video tokens."""
        return _sequences(request, self.transformers, self.vae)

    def load(self, dtype: str, device: str, report: Report, mesh: "Mesh | None" = None) -> "WanPipeline":
        """Load the weights; `report` is told how many components are done."""
        from safelight.pipelines.wan.pipeline import WanPipeline

        return WanPipeline.load(self, dtype, device, report, mesh)

    def _check_fit(self) -> None:
        """Raise CheckpointError where one component's output isn't the next one's input."""
        where = self.folder
        pairs: list[tuple[str, object, str, object]] = [
            pair
            for name, config in self.transformers.items()
            for pair in (
                (f"{name} text_dim", config.text_dim, "text_encoder d_model", self.text_encoder.d_model),
                (f"{name} in_channels", config.in_channels, "vae z_dim", self.vae.z_dim),
                (f"{name} out_channels", config.out_channels, "vae z_dim", self.vae.z_dim),
            )
        ]
        if self.transformer_2 is not None:
            patches = self.transformer_2.patch_size, self.transformer.patch_size
            pairs.append(("transformer_2 patch_size", patches[0], "transformer patch_size", patches[1]))
        problems = [f"{a} is {x}, {b} is {y}" for a, x, b, y in pairs if x != y]
        if problems:
            raise CheckpointError(f"{where}: the components don't fit together: {'; '.join(problems)}")


def layer_groups(configs: Configs, dtype: str) -> tuple[LayerGroup, ...]:
    """The attention layers of a Wan model that is known by its components' configurations.

    Wan 2.2's second expert is the component transformer_2.
    """
    missing = [component for component in ("text_encoder", "transformer", "vae") if component not in configs]
    if missing:
        raise CheckpointError(f"no configuration of {', '.join(missing)}; there are {', '.join(sorted(configs))}")
    text_encoder = Umt5Config.from_json(configs["text_encoder"], "text_encoder")
    return _layer_groups(text_encoder, _transformers(configs), _vae(configs), dtype)


def resolve(configs: Configs, request: Request, folder: Path | None = None) -> Request:
    """The request with defaults filled in: Wan 2.1's at 480p, or those of the checkpoint in a folder.

    Raises RequestError, with the nearest that the model can do.
    """
    manifest = read_json(folder / MANIFEST) if folder is not None and (folder / MANIFEST).exists() else {}
    defaults = Defaults() if folder is None else _defaults(manifest, folder / MANIFEST)
    return _resolved(request, defaults, _transformers(configs), _vae(configs))


def lengths(configs: Configs, request: Request) -> dict[str, Lengths]:
    """How large a resolved request makes the attention calls.

    The text is as long as it can be, and a frame at a time is decoded, as of a large video.
    """
    assert request.width is not None and request.height is not None
    vae = _vae(configs)
    positions = (request.height // vae.spatial_factor) * (request.width // vae.spatial_factor)
    found = {"vae.self": Lengths(batch=1, queries=positions, keys=positions)}
    for name, sequence in sequences(configs, request).items():
        rows, tokens = sequence.rows, sequence.tokens
        found["text_encoder.self"] = Lengths(batch=rows, queries=TEXT_LENGTH, keys=TEXT_LENGTH)
        found[f"{name}.self"] = Lengths(batch=rows, queries=tokens, keys=tokens)
        found[f"{name}.cross"] = Lengths(batch=rows, queries=tokens, keys=TEXT_LENGTH)
    return found


def sequences(configs: Configs, request: Request) -> dict[str, SharedSequence]:
    """What the ranks share of a resolved request: each transformer's video tokens."""
    return _sequences(request, _transformers(configs), _vae(configs))


def _transformers(configs: Configs) -> dict[str, WanConfig]:
    return {name: WanConfig.from_json(configs[name], name) for name in configs if name.startswith("transformer")}


def _vae(configs: Configs) -> WanVaeConfig:
    return WanVaeConfig.from_json(configs["vae"], "vae")


def _sequences(request: Request, transformers: Mapping[str, WanConfig], vae: WanVaeConfig) -> dict[str, SharedSequence]:
    """A resolved request's video as each transformer's tokens."""
    assert request.width is not None and request.height is not None and request.num_frames is not None
    frames = 1 + (request.num_frames - 1) // vae.temporal_factor
    positions = (request.height // vae.spatial_factor) * (request.width // vae.spatial_factor)
    found = {}
    for (component, config), scale in zip(transformers.items(), guidance_scales(request), strict=False):
        patch = math.prod(config.patch_size)
        rows, tokens = branches(scale), frames * positions // patch
        found[component] = SharedSequence(rows=rows, tokens=tokens, channels=config.out_channels * patch)
    return found


def guidance_scales(request: Request) -> tuple[float, float]:
    """A resolved request's guidance in the two stages; the second counts where there is one."""
    first, second = request.guidance_scale, request.guidance_scale_2
    assert first is not None
    return first, first if second is None else second


def _resolved(
    request: Request, defaults: Defaults, transformers: Mapping[str, WanConfig], vae: WanVaeConfig
) -> Request:
    """The request with defaults filled in. Raises RequestError, with the nearest the model can do."""
    resolved = request.replace(
        **{
            name: getattr(defaults, name)
            for name in ("width", "height", "num_frames", "fps", "num_steps", "guidance_scale", "negative_prompt")
            if getattr(request, name) is None
        }
    )
    problems = []
    if len(transformers) == 1 and request.guidance_scale_2 is not None:
        problems.append(f"guidance_scale_2 is {request.guidance_scale_2:g}; this model has one stage: leave it out")
    elif len(transformers) > 1 and request.guidance_scale_2 is None:
        # The default of the second stage goes with that of the first: who gives one scale means both stages.
        own = defaults.guidance_scale_2 if request.guidance_scale is None else None
        resolved = resolved.replace(guidance_scale_2=resolved.guidance_scale if own is None else own)
    assert resolved.width is not None and resolved.height is not None and resolved.num_frames is not None
    # Two transformers take the same latents, in patches of one size.
    patch_t, patch_h, patch_w = next(iter(transformers.values())).patch_size
    space, time = vae.spatial_factor, vae.temporal_factor
    # The first latent frame is one frame, any other `time` frames.
    first = 1 + (patch_t - 1) * time
    for name, value, smallest, step in (
        ("width", resolved.width, space * patch_w, space * patch_w),
        ("height", resolved.height, space * patch_h, space * patch_h),
        ("num_frames", resolved.num_frames, first, time * patch_t),
    ):
        most = min(transformer.rope_max_seq_len for transformer in transformers.values())
        largest = smallest + (most - 1) * step
        problems += _off_grid(name, value, smallest, step, largest)
    if problems:
        raise request_error(problems)
    return resolved


def _layer_groups(
    text_encoder: Umt5Config, transformers: Mapping[str, WanConfig], vae: WanVaeConfig, dtype: str
) -> tuple[LayerGroup, ...]:
    denoising = [group for name, config in transformers.items() for group in config.attention_groups(dtype, name)]
    return (
        LayerGroup(requirements=text_encoder.attention_requirements(dtype), count=text_encoder.num_layers),
        *denoising,
        # The VAE always runs in float32.
        LayerGroup(requirements=vae.attention_requirements("float32"), count=1),
    )


def _stage_problems(index: ModelIndex) -> list[str]:
    """What is wrong with the two stages that model_index.json speaks of, if it does."""
    ratio = index.settings.get("boundary_ratio")
    if ratio is not None and not (type(ratio) in (int, float) and 0 <= ratio <= 1):
        return [f"boundary_ratio is {ratio!r}; it must be a number from 0 to 1"]
    if (ratio is None) == ("transformer_2" in index.components):
        there, missing = ("transformer_2", "boundary_ratio") if ratio is None else ("boundary_ratio", "transformer_2")
        return [f"{there} is there and {missing} isn't; a model with two stages has both"]
    return []


def _boundary(index: ModelIndex, scheduler: Mapping[str, Any]) -> float:
    """The timestep from which on the first transformer takes the steps."""
    return float(index.settings["boundary_ratio"] * scheduler.get("num_train_timesteps", 1000))


def _foreign_components(index: ModelIndex) -> list[str]:
    """What model_index.json names that isn't text-to-video Wan's; its code is never imported."""
    problems = []
    staged = {"transformer_2": COMPONENTS["transformer"]} if "transformer_2" in index.components else {}
    for component, (library, classes) in {**COMPONENTS, **staged}.items():
        found_library, found = index.components[component]
        if classes and found not in classes:
            problems.append(f"{component} is {found}; text-to-video Wan has {' or '.join(classes)}")
        if found_library != library:
            problems.append(f"{component} is of {found_library}; text-to-video Wan has one of {library}")
    return problems


def _off_grid(name: str, value: int, smallest: int, step: int, largest: int) -> list[str]:
    """A problem, with the nearest values, if `value` isn't `smallest` plus a multiple of `step`, up to `largest`."""
    if smallest <= value <= largest and (value - smallest) % step == 0:
        return []
    below = max(smallest, min(largest, smallest + (value - smallest) // step * step))
    above = min(largest, below + step) if value > smallest else smallest
    nearest, other = sorted((below, above), key=lambda allowed: abs(value - allowed))
    rule = f"a multiple of {step}" if smallest == step else f"{smallest} or a multiple of {step} more"
    hint = "" if nearest == other else f" (or {other})"
    return [f"{name} is {value}; this model needs {rule}, up to {largest}: the nearest is {nearest}{hint}"]


def _defaults(manifest: Mapping[str, Any], path: Path) -> Defaults:
    given = dict(manifest.get("defaults", {}))
    unknown = sorted(set(given) - set(Defaults.__dataclass_fields__))
    if unknown:
        raise CheckpointError(f"{path}: unknown defaults {unknown}; they are {sorted(Defaults.__dataclass_fields__)}")
    try:
        if "fps" in given:
            given["fps"] = parse_fps(given["fps"])
        Request(prompt="any", **given)
    except RequestError as error:
        raise CheckpointError(f"{path}: defaults: {error.message}", path=str(path)) from error
    return Defaults(**given)


def _training(manifest: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the manifest says of the model's training, as WanCheckpoint's fields."""
    sizes = manifest.get("trained_sizes", [])
    if not (isinstance(sizes, list) and all(isinstance(s, list) and [type(n) for n in s] == [int, int] for s in sizes)):
        raise CheckpointError(f"{path}: trained_sizes is {sizes!r}; it must be a list of [width, height]")
    frames = manifest.get("trained_max_frames")
    if frames is not None and type(frames) is not int:
        raise CheckpointError(f"{path}: trained_max_frames is {frames!r}; it must be a whole number")
    return {"trained_sizes": tuple((width, height) for width, height in sizes), "trained_max_frames": frames}
