"""Binds a plan to a model: gives each Attention layer the kernel of its backend. After that, nothing selects."""

from collections.abc import Mapping

from torch import nn

from safelight.attention.backend import AttentionBackend, AttentionFn
from safelight.attention.layer import Attention
from safelight.attention.plan import AttentionPlan
from safelight.attention.requirements import AttentionRequirements
from safelight.catalog import BROKEN, cause_of
from safelight.errors import BackendUnavailableError


def bind(component: str, module: nn.Module, plan: AttentionPlan, backends: Mapping[str, AttentionBackend]) -> None:
    """Bind every Attention layer inside `module` to the kernel that the plan names for its requirements.

    Layers with equal requirements share one loaded kernel. A layer whose requirements the plan doesn't have is our
    mistake and asserts. Raises BackendUnavailableError, with the cause, for a kernel that can't be loaded.
    """
    kernels: dict[AttentionRequirements, tuple[AttentionBackend, AttentionFn]] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, Attention):
            continue
        requirements = layer.requirements
        if requirements not in kernels:
            backend = backends[plan.backend_for(requirements)]
            kernels[requirements] = (backend, _load(backend, requirements))
        layer.backend, layer.kernel = kernels[requirements]
        layer.name = f"{component}.{name}" if name else component


def _load(backend: AttentionBackend, requirements: AttentionRequirements) -> AttentionFn:
    assert backend.load is not None, f"{backend.name} was selected without an adapter"
    try:
        return backend.load(requirements)
    except BROKEN as error:
        layer = f"{requirements.component}.{requirements.role}"
        raise BackendUnavailableError(
            f"attention backend {backend.name}, selected for {layer}, can't be loaded: {cause_of(error)}. "
            f"Repair it, or pick another with --attention {layer}=NAME",
            backend=backend.name,
            package=None if backend.package is None else backend.package.key,
            cause=cause_of(error),
            layer=layer,
        ) from error
