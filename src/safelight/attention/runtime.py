"""Binds a plan to a model: gives each Attention layer the kernel of its backend. After that, nothing selects."""

from collections.abc import Mapping

from torch import nn

from safelight.attention.backend import AttentionBackend, AttentionFn
from safelight.attention.layer import Attention
from safelight.attention.plan import AttentionPlan
from safelight.attention.requirements import AttentionRequirements


def bind(component: str, module: nn.Module, plan: AttentionPlan, backends: Mapping[str, AttentionBackend]) -> None:
    """Bind every Attention layer inside `module` to the kernel that the plan names for its requirements.

    Layers with equal requirements share one loaded kernel. A layer whose requirements the plan doesn't have is our
    mistake and asserts.
    """
    kernels: dict[AttentionRequirements, tuple[AttentionBackend, AttentionFn]] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, Attention):
            continue
        requirements = layer.requirements
        if requirements not in kernels:
            backend = backends[plan.backend_for(requirements)]
            assert backend.load is not None, f"{backend.name} was selected without an adapter"
            kernels[requirements] = (backend, backend.load(requirements))
        layer.backend, layer.kernel = kernels[requirements]
        layer.name = f"{component}.{name}"
