"""Model families: what the engine knows of one. A checkpoint is read without torch, and loads into a pipeline.

A family is a package in here that holds its declaration, FAMILY.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from safelight.attention.grid import SharedSequence
from safelight.attention.plan import LayerGroup
from safelight.request import Request
from safelight.weights.model_index import ModelIndex

if TYPE_CHECKING:
    import torch

    from safelight.distributed.mesh import Mesh
    from safelight.sampling.denoise import StepState

Report = Callable[[int, int], None]
Configs = Mapping[str, Mapping[str, Any]]  # the components' configurations, by component


class Pipeline(Protocol):
    """A loaded model."""

    @property
    def modules(self) -> Mapping[str, "torch.nn.Module"]:
        """The components by name, for binding attention kernels."""
        ...

    def encode(self, request: Request) -> tuple[Any, tuple[str, ...]]:
        """The prompt as the model wants it, and warnings."""
        ...

    def denoise(self, request: Request, text: Any, seeds: Sequence[int]) -> Iterator["StepState"]:
        """Step states of one batch of outputs, a latent for each seed."""
        ...

    def decode(self, latents: "torch.Tensor", report: Report) -> "torch.Tensor":
        """Pixels in [0, 1], float [batch, frames, height, width, 3]; `report` is told of its parts."""
        ...

    def batches(self, request: Request, seeds: Sequence[int]) -> Iterator[Sequence[int]]:
        """The seeds in batches that run together."""
        ...


class Checkpoint(Protocol):
    """A model's folder, its configurations read and its files' headers checked; no weights and no torch."""

    @property
    def folder(self) -> Path:
        """The model's folder."""
        ...

    def layer_groups(self, dtype: str) -> tuple[LayerGroup, ...]:
        """Every attention layer, in the order in which a request meets them."""
        ...

    def resolve(self, request: Request) -> Request:
        """The request with the model's defaults filled in. Raises RequestError for what the model can't do."""
        ...

    def warnings(self, request: Request) -> tuple[str, ...]:
        """What a person should know about a resolved request."""
        ...

    def load(self, dtype: str, device: str, report: Report) -> Pipeline:
        """Load the weights."""
        ...


@runtime_checkable
class ParallelCheckpoint(Checkpoint, Protocol):
    """A checkpoint whose model runs on several ranks."""

    def sequences(self, request: Request) -> Mapping[str, SharedSequence]:
        """What the ranks share of a resolved request, by the component that runs on all of them."""
        ...

    def load(self, dtype: str, device: str, report: Report, mesh: "Mesh | None" = None) -> Pipeline:
        """Load the weights.

        On a mesh the pipeline denoises together with those of the other ranks, and gives each the whole latents.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How many tokens attend to how many in one attention call, and in how many rows."""

    batch: int
    queries: int
    keys: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family's declaration. `class_name` is what model_index.json calls its pipeline.

    `open` reads a checkpoint. `layer_groups` gives a model's attention layers in a dtype from its components'
    configurations alone, by component; it raises CheckpointError. The rest says what a request makes of a model that is
    known like this: `resolve` fills the defaults in, which the folder of a checkpoint may have of its own, and raises
    RequestError for what the model can't do. Of a resolved request, `lengths` says how large the calls are, by
    "component.role", and `sequences` what the ranks share, by component. Where `resolve` or `lengths` is None nobody
    can say how large; where `sequences` is, the family doesn't run on several ranks.
    """

    name: str
    class_name: str
    open: Callable[[ModelIndex], Checkpoint]
    layer_groups: Callable[[Configs, str], tuple[LayerGroup, ...]]
    resolve: Callable[[Configs, Request, Path | None], Request] | None = None
    lengths: Callable[[Configs, Request], Mapping[str, Lengths]] | None = None
    sequences: Callable[[Configs, Request], Mapping[str, SharedSequence]] | None = None
