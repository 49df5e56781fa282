"""AttentionPlan: the selection for every attention layer of one engine and request, as a printable value."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self

from safelight.attention.backend import AttentionBackend, Reason
from safelight.attention.requirements import ROLES, AttentionRequirements
from safelight.attention.select import (
    BackendPreference,
    Selection,
    Verdict,
    preferred,
    rejected_json,
    select_backend,
)
from safelight.errors import RequestError
from safelight.platforms import platform_named
from safelight.platforms.facts import MachineFacts


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers with equal requirements: what a model's declaration lists. `supported` is the layers' own set (S10)."""

    requirements: AttentionRequirements
    count: int
    supported: frozenset[str] | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """A group of layers and the backend that was selected for it."""

    requirements: AttentionRequirements
    count: int
    selection: Selection

    def to_json(self) -> dict[str, Any]:
        """The public JSON of one plan row."""
        preference = self.selection.preference
        return {
            "component": self.requirements.component,
            "role": self.requirements.role,
            "count": self.count,
            "backend": self.selection.backend,
            "reason": self.selection.reason,
            "preference": None if preference is None else preference.to_json(),
            "requirements": self.requirements.to_json(),
            "rejected": [rejected_json(verdict) for verdict in self.selection.rejected],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        rejected = tuple(
            Verdict(entry["backend"], tuple(Reason(**reason) for reason in entry["reasons"]))
            for entry in data["rejected"]
        )
        preference = data["preference"]
        return cls(
            requirements=AttentionRequirements.from_json(data["requirements"]),
            count=data["count"],
            selection=Selection(
                backend=data["backend"],
                preference=None if preference is None else BackendPreference.from_json(preference),
                reason=data["reason"],
                verdicts=(*rejected, Verdict(data["backend"])),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """Every layer's selection on one machine. Plans compare by value."""

    machine: MachineFacts
    layers: tuple[PlannedLayer, ...]

    def backend_for(self, requirements: AttentionRequirements) -> str:
        """The backend's name for layers with these requirements; KeyError if the plan has none."""
        for layer in self.layers:
            if layer.requirements == requirements:
                return layer.selection.backend
        raise KeyError(requirements)

    def lines(self) -> list[str]:
        """One line per component: "transformer: self x30 sdpa (platform default), cross x30 ..." (S13)."""
        parts: dict[str, list[str]] = {}
        for layer in self.layers:
            selection = layer.selection
            why = selection.reason or (selection.preference.source if selection.preference else "")
            text = f"{layer.requirements.role} x{layer.count} {selection.backend} ({why})"
            parts.setdefault(layer.requirements.component, []).append(text)
        return [f"{component}: {', '.join(texts)}" for component, texts in parts.items()]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """The public JSON of `explain`."""
        return {"machine": self.machine.to_json(), "layers": [layer.to_json() for layer in self.layers]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(
            machine=MachineFacts.from_json(data["machine"]),
            layers=tuple(PlannedLayer.from_json(layer) for layer in data["layers"]),
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def build_plan(
    groups: Sequence[LayerGroup],
    machine: MachineFacts,
    sources: Sequence[Sequence[BackendPreference]],
    backends: Mapping[str, AttentionBackend],
) -> AttentionPlan:
    """Select for every group. `sources` are the preferences of S1, nearest source first.

    Raises RequestError for a component or role that the model doesn't have, and SelectionError.
    """
    _check_names(groups, sources)
    order = platform_named(machine.platform).automatic_order(machine)
    layers = tuple(
        PlannedLayer(
            requirements=group.requirements,
            count=group.count,
            selection=select_backend(
                group.requirements,
                machine,
                preferred(group.requirements, sources),
                group.supported,
                backends,
                order=order,
            ),
        )
        for group in groups
    )
    return AttentionPlan(machine=machine, layers=layers)


def _check_names(groups: Sequence[LayerGroup], sources: Sequence[Sequence[BackendPreference]]) -> None:
    """Refuse a preference that names what isn't there."""
    roles: dict[str, set[str]] = {}
    for group in groups:
        roles.setdefault(group.requirements.component, set()).add(group.requirements.role)
    known = [
        name for component in roles for name in (component, *(f"{component}.{r}" for r in sorted(roles[component])))
    ]
    for preference in (preference for source in sources for preference in source):
        if preference.names and preference.names not in known:
            near = get_close_matches(preference.names, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            component, _, role = preference.names.partition(".")
            what = f"no role {role!r}" if component in roles and role in ROLES else "no component or role"
            raise RequestError(
                f"{preference.source} names {preference.names}: this model has {what} of that name{hint} "
                f"It has {', '.join(known)}",
                names=preference.names,
                known=known,
            )
