"""select_backend: which kernel a layer gets, and why. A pure function of data (rules S1 to S9)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Self

from safelight.attention.backend import AttentionBackend, Reason, ReasonKind
from safelight.attention.ranking import Measured, Ranking
from safelight.attention.requirements import MASKS, AttentionRequirements
from safelight.attention.versions import is_at_least
from safelight.catalog import Found, LoadFailure, declarations
from safelight.errors import (
    BackendNotSupportedError,
    BackendUnavailableError,
    CapabilityError,
    NoBackendError,
    SelectionError,
)
from safelight.platforms import platform_named
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

AUTO = "auto"
# The reason of a selection that nobody preferred and that measured times decided.
MEASURED_FASTEST = "measured fastest"
# Times that differ by less are one: a run's own scatter is as large.
TIE = 1.05


@dataclass(frozen=True)
class BackendPreference:
    """A backend somebody or something would like: by whom, how firmly and for which layers.

    `explicit` means a person said so. `names` is what it was given for: "" everything, "component" or
    "component.role". `source` is printable, such as "`--attention` flag".
    """

    backend: str
    source: str
    explicit: bool
    names: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The preference as plain data."""
        data: dict[str, Any] = {"backend": self.backend, "source": self.source, "explicit": self.explicit}
        if self.names:
            data["names"] = self.names
        if self.options:
            data["options"] = dict(self.options)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(**{**data, "options": tuple(data.get("options", {}).items())})


@dataclass(frozen=True)
class Verdict:
    """What was found about one candidate: no reasons means it fits."""

    backend: str
    reasons: tuple[Reason, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain data."""
        return {"backend": self.backend, "reasons": [{"kind": r.kind, "detail": r.detail} for r in self.reasons]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(data["backend"], tuple(Reason(**reason) for reason in data["reasons"]))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The backend for one kind of layer, how it came to that, and a verdict for every candidate considered.

    `reason` is None where a preference was honoured. The last verdict is the chosen backend's, the others are refusals.
    `measured` are the times that decided, None where none did.
    """

    backend: str
    preference: BackendPreference | None
    reason: str | None
    verdicts: tuple[Verdict, ...] = field(repr=False)
    measured: Measured | None = field(default=None, repr=False)

    @property
    def rejected(self) -> tuple[Verdict, ...]:
        """The candidates that were refused on the way."""
        return tuple(verdict for verdict in self.verdicts if verdict.reasons)

    def to_json(self) -> dict[str, Any]:
        """The selection as plain data."""
        return {
            "backend": self.backend,
            "reason": self.reason,
            "preference": None if self.preference is None else self.preference.to_json(),
            "rejected": [verdict.to_json() for verdict in self.rejected],
            **({} if self.measured is None else {"measured": self.measured.to_json()}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        preference = data["preference"]
        return cls(
            backend=data["backend"],
            preference=None if preference is None else BackendPreference.from_json(preference),
            reason=data["reason"],
            verdicts=(*map(Verdict.from_json, data["rejected"]), Verdict(data["backend"])),
            measured=Measured.from_json(data["measured"]) if "measured" in data else None,
        )


def found_backends() -> Found:
    """Every declared backend, and the plug-ins that gave none: broken ones, and ones that claim a name twice."""
    return declarations("safelight.attention.backends", "BACKEND", "safelight.backends", names=_names)


def declared_backends() -> dict[str, AttentionBackend]:
    """Every declared backend by name: the package's own and those of installed plug-ins."""
    return by_name(found_backends())


def by_name(found: Found) -> dict[str, AttentionBackend]:
    """The backends that were found, by name. A plug-in that gave none stands there too, and says why it can't serve."""
    backends: dict[str, AttentionBackend] = {backend.name: backend for backend in found.declarations}
    for failure in found.failures:
        if canonical(failure.name, backends) not in backends:
            backends[failure.name] = _broken_plug_in(failure)
    return backends


def _broken_plug_in(failure: LoadFailure) -> AttentionBackend:
    reason = Reason("package", f"the plug-in {failure.origin} doesn't load: {failure.cause}")
    return AttentionBackend(
        name=failure.name,
        summary="a plug-in that doesn't load",
        load=None,
        # Nobody knows what it could do; the one thing to say is why it isn't there.
        dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
        masks=frozenset(MASKS),
        packed_varlen=True,
        lse=True,
        why_not=lambda requirements, machine: (reason,),
    )


def _names(backend: AttentionBackend) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.casefold() for name in (backend.name, *backend.aliases)))


def preferred(
    requirements: AttentionRequirements, sources: Iterable[Sequence[BackendPreference]]
) -> BackendPreference | None:
    """The preference that applies to a layer (S1): nearest source first, in it the most specific name first."""
    component = requirements.component
    for source in sources:
        by_name = {preference.names: preference for preference in source}
        for name in (f"{component}.{requirements.role}", component, ""):
            if name in by_name:
                return None if by_name[name].backend == AUTO else by_name[name]
    return None


def select_backend(
    requirements: AttentionRequirements,
    machine: MachineFacts,
    preference: BackendPreference | None = None,
    supported: frozenset[str] | None = None,
    backends: Mapping[str, AttentionBackend] | None = None,
    *,
    order: Sequence[str] | None = None,
    runs_here: bool = False,
    measured: Ranking | None = None,
) -> Selection:
    """Choose the backend for layers with these requirements on this machine.

    `supported` is the layer's own set (S10); None means any. `backends` defaults to everything declared, `order` to
    the automatic order of the machine's platform. With `runs_here` a backend whose adapter isn't built is refused.
    `measured` are times of this machine: exact dense backends that were measured in a fitting shape are tried before
    the order's, fastest first, where one of them is faster than the order's own choice, measured too. Raises a
    SelectionError that lists every verdict (S9).
    """
    backends = declared_backends() if backends is None else backends
    order = platform_named(machine.platform).automatic_order(machine) if order is None else order
    wish = None if preference is None or preference.backend == AUTO else preference
    asked = None if wish is None else canonical(wish.backend, backends)
    fallback = _fallback_reason(requirements, wish, backends.get(asked) if asked else None)

    def fits(name: str) -> bool:
        return not why_not(name, requirements, machine, backends, supported, runs_here=runs_here)

    times, by_time, best = None, [], None
    if measured is not None and fallback is not None:
        usual = next((name for name in order if name in backends and fits(name)), None)
        times = _deciding(measured, requirements, backends, usual)
        if times is not None:
            by_time = _exact_dense(times, backends)
            best = next(name for name in by_time if fits(name))
            medians = {timing.backend: timing.median_s for timing in times.timings}
            if usual is not None and medians[usual] <= TIE * medians[best]:
                by_time = [usual]
    order = tuple(dict.fromkeys((*by_time, *order)))

    candidates = [] if asked is None else [asked]
    if fallback is not None:
        candidates += [name for name in order if name in backends]
        candidates += sorted(backends if supported is None else supported)
    verdicts: list[Verdict] = []
    for name in dict.fromkeys(candidates):
        is_chosen_by_person = name == asked and wish is not None and wish.explicit
        reasons = why_not(
            name, requirements, machine, backends, supported, is_explicit=is_chosen_by_person, runs_here=runs_here
        )
        verdicts.append(Verdict(name, reasons))
        if not reasons:
            is_measured = name != asked and name in by_time
            is_fastest = is_measured and name == best and wish is None
            reason = None if name == asked else MEASURED_FASTEST if is_fastest else fallback
            return Selection(
                backend=name,
                preference=wish,
                reason=reason,
                verdicts=tuple(verdicts),
                measured=times if is_measured else None,
            )
    raise _refusal(requirements, machine, wish, supported, backends, order, verdicts, runs_here)


def _deciding(
    ranking: Ranking, requirements: AttentionRequirements, backends: Mapping[str, AttentionBackend], usual: str | None
) -> Measured | None:
    """The times that count for a layer: of the fitting shapes in which its usual backend was timed, the first one's."""
    return next((times for times in ranking.fitting(requirements) if usual in _exact_dense(times, backends)), None)


def _exact_dense(times: Measured, backends: Mapping[str, AttentionBackend]) -> list[str]:
    """The measured backends that may be taken unasked (S7), fastest first; a name that is gone is left out."""
    names = [timing.backend for timing in times.timings if timing.backend in backends]
    return [name for name in names if not (backends[name].is_sparse or backends[name].is_lossy)]


def canonical(name: str, backends: Mapping[str, AttentionBackend]) -> str:
    """The declared name behind a name or an alias, in capitals or not; an unknown one is returned as it is."""
    if name in backends:
        return name
    folded = name.casefold()
    for backend in sorted(backends):
        if backend.casefold() == folded:
            return backend
    # Of two plug-ins that claim one alias the same wins every time, in whatever order they were found.
    return min(
        (backend.name for backend in backends.values() if folded in map(str.casefold, backend.aliases)), default=name
    )


def why_not(
    name: str,
    requirements: AttentionRequirements,
    machine: MachineFacts,
    backends: Mapping[str, AttentionBackend],
    supported: frozenset[str] | None = None,
    *,
    is_explicit: bool = False,
    runs_here: bool = False,
) -> tuple[Reason, ...]:
    """Every reason against one candidate (S6); none means it fits."""
    backend = backends.get(name)
    if backend is None:
        near = get_close_matches(name.lower(), [*backends, *(a for b in backends.values() for a in b.aliases)], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return (Reason("unknown", f"no backend has this name{hint}, there are {', '.join(sorted(backends))}"),)
    reasons = [*hardware_reasons(backend, machine, runs_here=runs_here)]
    if supported is not None and name not in supported:
        reasons.append(Reason("scope", "not supported by this attention layer"))
    reasons += [Reason("capability", detail) for detail in _missing(backend, requirements)]
    reasons += backend.why_not(requirements, machine)
    if not is_explicit and (backend.is_sparse or backend.is_lossy):
        kind = "sparse" if backend.is_sparse else "lossy"
        reasons.append(Reason("policy", f"{kind} kernels change the picture and are never taken unasked"))
    return tuple(reasons)


def hardware_reasons(
    backend: AttentionBackend, machine: MachineFacts, *, runs_here: bool = False
) -> tuple[Reason, ...]:
    """What a machine lacks for a backend, whatever the layer: platform, architecture, package, adapter."""
    reasons = []
    if backend.platforms and machine.platform not in backend.platforms:
        allowed = ", ".join(sorted(backend.platforms))
        reasons.append(Reason("platform", f"runs on {allowed}, this machine is {machine.platform}"))
    arches = backend.arches.get(machine.platform)
    if arches is not None and machine.arch not in arches:
        reasons.append(Reason("arch", f"has code for {', '.join(arches)}, this device is {machine.arch}"))
    if backend.package is not None:
        reasons += [Reason("package", detail) for detail in _package_problems(backend.package, machine)]
    elif (facts := machine.packages.get(backend.name)) is not None and facts.import_error is not None:
        # A kernel of torch's own that couldn't be loaded (S11).
        reasons.append(Reason("package", f"{backend.name} can't be loaded: {facts.import_error}"))
    if runs_here and backend.load is None:
        reasons.append(Reason("package", "adapter not built yet"))
    return tuple(reasons)


def _package_problems(package: Package, machine: MachineFacts) -> Iterable[str]:
    facts = machine.packages.get(package.key)
    if facts is None:
        yield f"package {package.dists[0]} is not installed ({package.remedy})"
        return
    if facts.import_error is not None:
        yield f"package {facts.dist} is broken: {facts.import_error}"
    if package.min_version is None or facts.import_error is not None:
        return
    is_new_enough = is_at_least(facts.version, package.min_version)
    if is_new_enough is None:
        yield f"package {facts.dist} has no known version: {package.min_version} is the first that serves"
    elif not is_new_enough:
        yield f"package {facts.dist} {facts.version} is too old: {package.min_version} is the first that serves"


def _missing(backend: AttentionBackend, need: AttentionRequirements) -> Iterable[str]:
    """What the layer needs and the kernel lacks."""
    if need.dtype not in backend.dtypes:
        yield f"no dtype {need.dtype} (takes {', '.join(sorted(backend.dtypes))})"
    if backend.head_dims is not None and not backend.head_dims(need.head_dim):
        yield f"no head_dim {need.head_dim} (takes {backend.head_dims_text})"
    if need.num_kv_heads != need.num_heads and not backend.grouped_query:
        yield f"no grouped-query ({need.num_heads} heads on {need.num_kv_heads})"
    if need.num_heads % need.num_kv_heads:
        yield f"no {need.num_heads} heads on {need.num_kv_heads}, which doesn't divide them"
    if need.causal and not backend.causal:
        yield "no causal"
    if need.mask not in backend.masks:
        yield f"no mask {need.mask} (takes {', '.join(sorted(backend.masks - {'none'})) or 'no mask at all'})"
    if need.packed_varlen and not backend.packed_varlen:
        yield "no packed varlen"
    if need.needs_lse and not backend.lse:
        yield "no LSE"
    if need.scale is not None and need.scale != need.head_dim**-0.5 and not backend.custom_scale:
        yield f"no scale {need.scale} (takes head_dim ** -0.5)"
    # Results that are merged by their LSE are often of blocks, and those are as long as they come.
    may_differ = (need.role == "cross" or need.needs_lse) and not need.equal_lengths
    if may_differ and not backend.cross_lengths:
        yield "no unequal lengths of queries and keys"
    if need.role == "cross" and backend.is_sparse:
        yield "no role cross (a sparse kernel has nothing to leave out there)"
    elif need.role != "self" and backend.self_only:
        yield f"no role {need.role} (made for self-attention alone)"


def _fallback_reason(
    requirements: AttentionRequirements, wish: BackendPreference | None, backend: AttentionBackend | None
) -> str | None:
    """Why another backend may be taken (S5), or None if it may not."""
    if wish is None:
        return "platform default"
    names_role = wish.names == f"{requirements.component}.{requirements.role}"
    if (
        requirements.role == "cross"
        and backend is not None
        and (backend.is_sparse or backend.self_only)
        and not names_role
    ):
        return "dense cross-attention fallback"
    if not wish.explicit:
        return "platform default fallback"
    if requirements.is_auxiliary and wish.names == "":
        return f"not required for {requirements.component}"
    return None


def _refusal(
    requirements: AttentionRequirements,
    machine: MachineFacts,
    wish: BackendPreference | None,
    supported: frozenset[str] | None,
    backends: Mapping[str, AttentionBackend],
    order: Sequence[str],
    verdicts: Sequence[Verdict],
    runs_here: bool,
) -> SelectionError:
    """The error for a layer that no candidate fits (S9)."""
    kinds: set[ReasonKind] = {reason.kind for verdict in verdicts for reason in verdict.reasons}
    error: type[SelectionError] = NoBackendError
    if "capability" in kinds:
        error = CapabilityError
    elif kinds & {"scope", "unknown"}:
        error = BackendNotSupportedError
    elif kinds & {"platform", "arch", "package"}:
        error = BackendUnavailableError
    layer = f"{requirements.component}.{requirements.role}"
    asked = "nothing was asked for"
    if wish is not None:
        asked = f"{wish.backend} was {'asked for' if wish.explicit else 'preferred'} ({wish.source})"
    refused = "; ".join(f"{v.backend}: {' and '.join(r.detail for r in v.reasons)}" for v in verdicts)
    # What is taken unasked comes first, in the order in which it would be.
    fits = [
        name
        for unasked in (True, False)
        for name in dict.fromkeys((*order, *sorted(backends)))
        if name in backends
        and unasked != (backends[name].is_sparse or backends[name].is_lossy)
        and not why_not(name, requirements, machine, backends, supported, is_explicit=True, runs_here=runs_here)
    ]
    remedy = "No declared backend would do"
    if fits:
        remedy = f"These would do: {', '.join(fits)}; pick one with --attention {layer}={fits[0]}"
    return error(
        f"no attention backend for {layer} (head_dim {requirements.head_dim}, {requirements.dtype}) on "
        f"{machine.platform} {machine.arch}: {asked}. Refused: {refused or 'none, there are no candidates'}. {remedy}.",
        layer=layer,
        preference=None if wish is None else wish.to_json(),
        requirements=requirements.to_json(),
        rejected=[verdict.to_json() for verdict in verdicts],
        would_do=fits,
    )
