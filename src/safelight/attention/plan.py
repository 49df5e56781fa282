"""AttentionPlan: the selection for every attention layer of one engine and request, as a printable value."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Self

from safelight.attention.backend import AttentionBackend
from safelight.attention.grid import Grid, check_grid
from safelight.attention.ranking import Ranking
from safelight.attention.requirements import AttentionRequirements
from safelight.attention.select import BackendPreference, Selection, canonical, preferred, select_backend, why_not
from safelight.errors import BackendNotSupportedError, RequestError
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
    """A group of layers and the backend that was selected for it. `supported` is the layers' own set (S10)."""

    requirements: AttentionRequirements
    count: int
    selection: Selection
    supported: frozenset[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """The public JSON of one plan row."""
        selection = self.selection.to_json()
        scope = {} if self.supported is None else {"supported": sorted(self.supported)}
        times = {"measured": selection["measured"]} if "measured" in selection else {}
        return {
            "component": self.requirements.component,
            "role": self.requirements.role,
            "count": self.count,
            "backend": selection["backend"],
            "reason": selection["reason"],
            "preference": selection["preference"],
            "requirements": self.requirements.to_json(),
            "rejected": selection["rejected"],
            **scope,
            **times,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(
            requirements=AttentionRequirements.from_json(data["requirements"]),
            count=data["count"],
            selection=Selection.from_json(data),
            supported=frozenset(data["supported"]) if "supported" in data else None,
        )


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """Every layer's selection on one machine, or on each of several that share the work. Plans compare by value.

    On a grid of ranks the requirements are what a layer asks of the kernel on one of them.
    """

    machine: MachineFacts
    layers: tuple[PlannedLayer, ...]
    grid: Grid = field(default_factory=Grid)

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
        grid = {} if self.grid.num_ranks == 1 else {"grid": self.grid.to_json()}
        return {"machine": self.machine.to_json(), **grid, "layers": [layer.to_json() for layer in self.layers]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(
            machine=MachineFacts.from_json(data["machine"]),
            layers=tuple(PlannedLayer.from_json(layer) for layer in data["layers"]),
            grid=Grid.from_json(data["grid"]) if "grid" in data else Grid(),
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def build_plan(
    groups: Sequence[LayerGroup],
    machine: MachineFacts,
    sources: Sequence[Sequence[BackendPreference]],
    backends: Mapping[str, AttentionBackend],
    *,
    runs_here: bool = False,
    measured: Ranking | None = None,
    grid: Grid | None = None,
) -> AttentionPlan:
    """Select for every group. `sources` are the preferences of S1, nearest source first.

    The platform's own preference, if it has one, comes last and is implicit. With `runs_here` the plan is one to run: a
    backend without an adapter is refused. `measured` are this machine's own times, for what nobody chose. With a `grid`
    the layers are planned as they run on each of its ranks. Raises RequestError for a component or role that the model
    doesn't have and for a grid that doesn't fit it, and SelectionError.
    """
    grid = Grid() if grid is None else grid
    kinds = {(group.requirements, group.supported) for group in groups}
    assert len(kinds) == len(groups), "layers with equal requirements and equal scope are one group"
    check_names(groups, sources)
    check_grid(grid, [group.requirements for group in groups])
    groups = _on_grid(groups, grid)
    platform = platform_named(machine.platform)
    order = platform.automatic_order(machine)
    habit = platform.preference(machine)
    if habit is not None:
        sources = (*sources, (BackendPreference(habit, f"platform {platform.name}", explicit=False),))
    layers = []
    for group in groups:
        preference = preferred(group.requirements, sources)
        selection = select_backend(
            group.requirements,
            machine,
            preference,
            group.supported,
            backends,
            order=order,
            runs_here=runs_here,
            measured=measured,
        )
        _check_backend(selection, group, machine, backends)
        layers.append(
            PlannedLayer(
                requirements=group.requirements, count=group.count, selection=selection, supported=group.supported
            )
        )
    return AttentionPlan(machine=machine, layers=tuple(layers), grid=grid)


def _on_grid(groups: Sequence[LayerGroup], grid: Grid) -> list[LayerGroup]:
    """The groups as each rank has them; what differed only in whole may be equal in parts."""
    counts: dict[tuple[AttentionRequirements, frozenset[str] | None], int] = {}
    for group in groups:
        kind = (grid.local(group.requirements), group.supported)
        counts[kind] = counts.get(kind, 0) + group.count
    return [
        LayerGroup(requirements=need, count=count, supported=supported) for (need, supported), count in counts.items()
    ]


def check_names(groups: Sequence[LayerGroup], sources: Sequence[Sequence[BackendPreference]]) -> None:
    """Raise RequestError for what a person said about a component or a role that the model doesn't have (S3)."""
    roles: dict[str, set[str]] = {}
    for group in groups:
        roles.setdefault(group.requirements.component, set()).add(group.requirements.role)
    known = [
        name for component in roles for name in (component, *(f"{component}.{r}" for r in sorted(roles[component])))
    ]
    problems, wrong = [], []
    for preference in (preference for source in sources for preference in source):
        if preference.explicit and preference.names and preference.names not in known:
            # Beside a component that is there, the list of its roles says more than a guess.
            is_there = preference.names.partition(".")[0] in roles
            near = [] if is_there else get_close_matches(preference.names, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            problems.append(f"{preference.source} names {preference.names}, which this model doesn't have{hint}")
            wrong.append(preference.names)
    if problems:
        raise RequestError(f"{'; '.join(problems)}; it has {', '.join(known)}", names=wrong, known=known)


def _check_backend(
    selection: Selection, group: LayerGroup, machine: MachineFacts, backends: Mapping[str, AttentionBackend]
) -> None:
    """Refuse a person's slip in a backend's name also where a fallback would have covered it."""
    wish = selection.preference
    if wish is None or not wish.explicit or canonical(wish.backend, backends) in backends:
        return
    (reason,) = why_not(wish.backend, group.requirements, machine, backends)
    raise BackendNotSupportedError(
        f"{wish.source} asks for {wish.backend}: {reason.detail}",
        layer=f"{group.requirements.component}.{group.requirements.role}",
        preference=wish.to_json(),
        requirements=group.requirements.to_json(),
        rejected=[verdict.to_json() for verdict in selection.rejected],
        would_do=[selection.backend],
    )
