"""Loads a plan's kernels and binds them to a model: each Attention layer gets its own. After that, nothing selects."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from safelight.attention.backend import AttentionBackend, AttentionFn
from safelight.attention.guard import Guard
from safelight.attention.layer import Attention
from safelight.attention.parallel import Link, over_ranks
from safelight.attention.plan import AttentionPlan, PlannedLayer
from safelight.attention.requirements import AttentionRequirements
from safelight.catalog import BROKEN, NOT_BROKEN, cause_of
from safelight.errors import BackendUnavailableError
from safelight.platforms.facts import MachineFacts, PackageFacts

# What tells kinds of layers apart: requirements, and the layers' own set of backends.
Kind = tuple[AttentionRequirements, frozenset[str] | None]


@dataclass(frozen=True)
class LoadedPlan:
    """A plan and its kernels, one for each kind of layer."""

    plan: AttentionPlan
    kernels: Mapping[Kind, tuple[AttentionBackend, AttentionFn]]


def load_plan(
    plan_for: Callable[[MachineFacts], AttentionPlan],
    machine: MachineFacts,
    backends: Mapping[str, AttentionBackend],
) -> LoadedPlan:
    """Plan for the machine and load every kernel (S11).

    A kernel that a person asked for and that can't be loaded raises BackendUnavailableError with the cause. One that
    was taken by itself makes its package broken in the facts, and the plan is made again: the result's
    `plan.machine` says so. Running out of memory is never taken for a broken package.
    """
    while True:
        plan = plan_for(machine)
        kernels: dict[Kind, tuple[AttentionBackend, AttentionFn]] = {}
        for layer in plan.layers:
            backend = backends[layer.selection.backend]
            assert backend.load is not None, f"{backend.name} was selected to run without an adapter"
            try:
                kernels[layer.requirements, layer.supported] = (backend, backend.load(layer.requirements))
            except torch.OutOfMemoryError:
                raise
            except NOT_BROKEN:
                raise
            except BROKEN as error:
                if _is_asked(layer):
                    raise _cannot_load(backend, layer, error) from error
                key = backend.name if backend.package is None else backend.package.key
                machine = _with_broken(machine, key, cause_of(error))
                break
        else:
            return LoadedPlan(plan, kernels)


def bind(
    component: str,
    module: nn.Module,
    loaded: LoadedPlan,
    guard: Guard | None = None,
    links: tuple[Link, Link] | None = None,
) -> None:
    """Give every Attention layer inside `module` the kernel that the plan has for its kind, checked by `guard`.

    `links` are this rank's Ulysses and ring groups, where the plan is for a grid: there a kernel is called with what
    the rank has, and the layer with a slice of the sequence.
    The plan must have exactly the layers that are there: anything else is our mistake and asserts.
    """
    planned = {
        (layer.requirements, layer.supported): layer.count
        for layer in loaded.plan.layers
        if layer.requirements.component == component
    }
    found: dict[Kind, int] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, Attention):
            continue
        kind = (loaded.plan.grid.local(layer.requirements), layer.supported)
        assert kind in planned, f"{component}.{name}: the plan has no such layer: {layer.requirements}"
        found[kind] = found.get(kind, 0) + 1
        layer.name = f"{component}.{name}" if name else component
        layer.backend, kernel = loaded.kernels[kind]
        if guard is not None:
            kernel = guard.around(kernel, layer.backend, kind[0], layer.name)
        layer.kernel = kernel if links is None else over_ranks(kernel, layer.requirements, *links)
    assert found == planned, (
        f"{component} has {sorted(found.values())} layers of each kind, the plan {planned.values()}"
    )


def _is_asked(layer: PlannedLayer) -> bool:
    """Whether a person asked for the very backend that was selected, and it was more than a wish (S3)."""
    preference = layer.selection.preference
    is_wish = layer.requirements.is_auxiliary and preference is not None and preference.names == ""
    return preference is not None and preference.explicit and layer.selection.reason is None and not is_wish


def _with_broken(machine: MachineFacts, key: str, cause: str) -> MachineFacts:
    package = machine.packages.get(key, PackageFacts(dist=key))
    return machine.replace(packages={**machine.packages, key: dataclasses.replace(package, import_error=cause)})


def _cannot_load(backend: AttentionBackend, planned: PlannedLayer, error: BaseException) -> BackendUnavailableError:
    requirements, preference = planned.requirements, planned.selection.preference
    layer = f"{requirements.component}.{requirements.role}"
    return BackendUnavailableError(
        f"attention backend {backend.name}, selected for {layer}, can't be loaded: {cause_of(error)}. "
        f"Repair it, or pick another with --attention {layer}=NAME",
        backend=backend.name,
        package=None if backend.package is None else backend.package.key,
        cause=cause_of(error),
        layer=layer,
        preference=None if preference is None else preference.to_json(),
        requirements=requirements.to_json(),
        rejected=[verdict.to_json() for verdict in planned.selection.rejected],
    )
