"""From a model's name to its attention plan: opens models and gathers preferences. Imports no torch by itself."""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safelight.attention.backend import AttentionBackend
from safelight.attention.grid import Grid, check_grid
from safelight.attention.plan import AttentionPlan, LayerGroup, build_plan
from safelight.attention.ranking import Ranking, Shape
from safelight.attention.scope import forced_choices
from safelight.attention.select import BackendPreference
from safelight.attention.volume import StepVolume, step_volumes
from safelight.catalog import declarations
from safelight.config import CHECKS, DTYPES, AttentionChoice, Settings, attention_choices
from safelight.errors import CheckpointError, RequestError
from safelight.pipelines import Checkpoint, Family, ParallelCheckpoint
from safelight.platforms import platform_named
from safelight.platforms.facts import MachineFacts
from safelight.request import Request
from safelight.weights.hub import resolve_model
from safelight.weights.model_index import ModelIndex, read_model_index
from safelight.weights.reading import read_json

DEMO = Path(__file__).parent / "demo" / "checkpoint"
DEMO_NAME = "demo"
PUBLISHED = Path(__file__).parent / "models" / "published"

Sources = tuple[tuple[BackendPreference, ...], ...]


def check_model(model: str | Path | None) -> Checkpoint:
    """Read a model's configurations and file headers; None is the demo.

    Raises CheckpointError for everything that can be seen without loading weights.
    """
    if str(model) in published_models() and not Path(str(model)).exists():
        hub_id = _published(str(model))["hub_id"]
        raise CheckpointError(
            f"{model} is the name of a configuration that is shipped for planning; its weights are the hub's {hub_id}: "
            f"--model {hub_id}",
            hub_id=hub_id,
        )
    folder = DEMO if model is None else resolve_model(model)
    index = read_model_index(folder)
    return _family(index.class_name, str(index.path)).open(index)


def published_models() -> tuple[str, ...]:
    """The names of the published models whose configurations are shipped."""
    return tuple(sorted(path.stem for path in PUBLISHED.glob("*.json")))


def layers_of(model: str | Path | None) -> Callable[[str], tuple[LayerGroup, ...]]:
    """What gives a model's attention layers in a dtype: of a published model by its name, else of a checkpoint.

    A path that exists is a checkpoint, of which only the configurations are read. Raises CheckpointError.
    """
    family, configs, _ = _configured(model)
    return lambda dtype: family.layer_groups(configs, dtype)


def shapes_of(model: str | Path | None, request: Request) -> Callable[[str], dict[Shape, tuple[str, ...]]]:
    """What gives, in a dtype, the attention calls that a request makes of a model's layers.

    Each shape comes with the layers that have it, as "component.role". The model is named as for `layers_of`. Raises
    CheckpointError, and RequestError for what the model can't do.
    """
    family, configs, folder = _configured(model)
    if family.resolve is None or family.lengths is None:
        raise RequestError(
            f"{DEMO_NAME if model is None else model} is of the family {family.name}, which doesn't say how many "
            "tokens its layers have; give shapes instead"
        )
    lengths = family.lengths(configs, family.resolve(configs, request, folder))

    def shapes(dtype: str) -> dict[Shape, tuple[str, ...]]:
        found: dict[Shape, tuple[str, ...]] = {}
        for need in (group.requirements for group in family.layer_groups(configs, dtype)):
            name = f"{need.component}.{need.role}"
            if name in lengths and not (need.packed_varlen or need.needs_lse):
                size = lengths[name]
                shape = Shape.of(need, batch=size.batch, queries=size.queries, keys=size.keys)
                found[shape] = (*found.get(shape, ()), name)
        return found

    return shapes


def _configured(model: str | Path | None) -> tuple[Family, Mapping[str, Mapping[str, Any]], Path | None]:
    """A model's family, its components' configurations, and the folder of a checkpoint."""
    name = None if model is None else str(model)
    if name in published_models() and not Path(name).exists():
        document = _published(name)
        return _family(document["class_name"], f"{name}.json"), document["components"], None
    try:
        folder = DEMO if model is None else resolve_model(model, only_configs=True)
    except CheckpointError as error:
        near = difflib.get_close_matches(name or "", published_models(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        shipped = f"; shipped configurations are {', '.join(published_models())}{hint}"
        raise CheckpointError(f"{error.message}{shipped}", **error.details) from error
    index = read_model_index(folder)
    return _family(index.class_name, str(index.path)), _configs(index), index.path.parent


def preference_sources(
    *, argument: str | Mapping[str, str] | None, argument_source: str, settings: Settings
) -> Sources:
    """The preferences of an engine or a command, nearest source first: the argument, then the settings' own (S1)."""
    choices = () if argument is None else attention_choices(argument, argument_source)
    return tuple(map(as_preferences, (choices, *settings.attention)))


def request_sources(asked: Mapping[str, str], sources: Sources) -> Sources:
    """All sources for one request: the forced scope at this call, the request, then those of the engine (S1)."""
    return (*map(as_preferences, forced_choices()), as_preferences(attention_choices(asked, "the request")), *sources)


def as_preferences(choices: Iterable[AttentionChoice]) -> tuple[BackendPreference, ...]:
    """Choices as preferences: who made them, and whether a person did (S2)."""
    return tuple(BackendPreference(choice.backend, choice.source, choice.explicit, choice.names) for choice in choices)


def chosen_device(device: str | None, settings: Settings) -> tuple[str | None, str | None]:
    """The device that is asked for, else the settings', and then what set it."""
    if device is None and settings.device is not None:
        return settings.device.value, settings.device.source
    return device, None


def chosen_dtype(dtype: str | None, settings: Settings, machine: MachineFacts) -> str:
    """The dtype that is asked for, else the settings', else the platform's own. Raises RequestError."""
    if dtype is None:
        return settings.dtype.value if settings.dtype else platform_named(machine.platform).default_dtype(machine)
    if dtype not in DTYPES:
        raise RequestError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return dtype


def chosen_check(check: str | None, settings: Settings) -> str:
    """When kernels are held to the reference, else what the settings say, else never. Raises RequestError."""
    if check is None:
        return settings.check_attention.value if settings.check_attention else "off"
    if check not in CHECKS:
        raise RequestError(f"check_attention is {check!r}; it must be one of {', '.join(CHECKS)}")
    return check


def check_parallel(checkpoint: Checkpoint, grid: Grid, request: Request) -> None:
    """Raise RequestError where a resolved request can't be shared like this, with the grids that would work."""
    if grid.num_ranks == 1:
        return
    if not isinstance(checkpoint, ParallelCheckpoint):
        raise not_parallel(checkpoint.folder)
    needs = [group.requirements for group in checkpoint.layer_groups("float32")]  # heads are the same in any dtype
    check_grid(grid, needs, checkpoint.sequences(request))


def not_parallel(model: str | Path) -> RequestError:
    """The error for a model of a family that runs in one process alone."""
    return RequestError(f"{model} is of a family that doesn't run on several ranks")


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How ranks share a request: the request with the model's defaults, and what a step of each component sends."""

    request: Request
    volumes: tuple[StepVolume, ...]

    def to_json(self) -> dict[str, Any]:
        """The sharing as plain data: sizes, guidance, and the volumes, which are bytes."""
        fields = ("width", "height", "num_frames", "guidance_scale")
        return {**{name: getattr(self.request, name) for name in fields}, "steps": [v.to_json() for v in self.volumes]}


def sharing_of(model: str | Path | None, request: Request, grid: Grid) -> Callable[[str], Sharing]:
    """What gives, in a dtype, how the ranks of a grid share a request. Nothing is loaded.

    The model is named as for `layers_of`. Raises CheckpointError, and RequestError for what the model can't do and for
    what can't be shared like this, as `check_parallel`.
    """
    family, configs, folder = _configured(model)
    if family.resolve is None or family.sequences is None:
        raise not_parallel(DEMO_NAME if model is None else model)
    resolved = family.resolve(configs, request, folder)
    sequences = family.sequences(configs, resolved)
    check_grid(grid, [group.requirements for group in family.layer_groups(configs, "float32")], sequences)

    def sharing(dtype: str) -> Sharing:
        return Sharing(request=resolved, volumes=step_volumes(family.layer_groups(configs, dtype), grid, sequences))

    return sharing


def plan_model(
    model: str | Path | None,
    machine: MachineFacts,
    backends: Mapping[str, AttentionBackend],
    *,
    sources: Sources = (),
    dtype: str | None = None,
    runs_here: bool = False,
    measured: Ranking | None = None,
    grid: Grid | None = None,
) -> AttentionPlan:
    """The attention plan of a model on a machine, real or described, without any weight.

    `model` is a published model's name, a checkpoint, or None for the demo; `dtype` None is the platform's own;
    `measured` are times of this very machine; with a `grid` the plan is that of each of its ranks. Raises
    CheckpointError, RequestError and SelectionError.
    """
    groups = layers_of(model)(chosen_dtype(dtype, Settings(), machine))
    sources = request_sources({}, sources)
    return build_plan(groups, machine, sources, backends, runs_here=runs_here, measured=measured, grid=grid)


def _configs(index: ModelIndex) -> dict[str, dict[str, Any]]:
    """The configurations of a checkpoint's components, for those that have one."""
    files = {component: index.path.parent / component / "config.json" for component in index.components}
    return {component: read_json(path) for component, path in files.items() if path.exists()}


def _published(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    return document


def _family(class_name: str, where: str) -> Family:
    found = declarations("safelight.pipelines", "FAMILY", "safelight.models", names=_family_names)
    by_class: dict[str, Family] = {family.class_name: family for family in found.declarations}
    if class_name not in by_class:
        broken = [f"; the plug-in {failure.origin} doesn't load: {failure.cause}" for failure in found.failures]
        raise CheckpointError(
            f"{where}: _class_name is {class_name}; the pipelines are {', '.join(sorted(by_class))}{''.join(broken)}",
            allowed=sorted(by_class),
        )
    return by_class[class_name]


def _family_names(family: Family) -> tuple[str, ...]:
    return (family.name, family.class_name)
