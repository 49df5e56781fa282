"""The rules of selection (S2 to S9) written down a second time, and whether one selection keeps them."""

import json
from collections.abc import Mapping

from safelight.attention import (
    AttentionBackend,
    AttentionRequirements,
    BackendPreference,
    Selection,
    select_backend,
)
from safelight.attention.select import why_not
from safelight.attention.versions import is_at_least
from safelight.errors import (
    BackendNotSupportedError,
    BackendUnavailableError,
    CapabilityError,
    NoBackendError,
    SelectionError,
    error_from_json,
)
from safelight.platforms import MachineFacts

Backends = Mapping[str, AttentionBackend]


def has_capabilities(backend: AttentionBackend, need: AttentionRequirements) -> bool:
    """Rule S6's capabilities."""
    may_differ = (need.role == "cross" or need.needs_lse) and not need.equal_lengths
    lacks_lengths = may_differ and not backend.cross_lengths
    return (
        need.dtype in backend.dtypes
        and (backend.head_dims is None or backend.head_dims(need.head_dim))
        and (backend.grouped_query or need.num_heads == need.num_kv_heads)
        and (backend.causal or not need.causal)
        and need.mask in backend.masks
        and (backend.packed_varlen or not need.packed_varlen)
        and (backend.lse or not need.needs_lse)
        and (backend.custom_scale or need.scale in (None, need.head_dim**-0.5))
        and not lacks_lengths
        and not (need.role == "cross" and backend.is_sparse)
        and not (need.role != "self" and backend.self_only)
    )


def is_there(backend: AttentionBackend, machine: MachineFacts) -> bool:
    """Rule S6's platform, architecture and package."""
    if backend.platforms and machine.platform not in backend.platforms:
        return False
    if machine.arch not in backend.arches.get(machine.platform, (machine.arch,)):
        return False
    if backend.package is None:
        # A kernel of torch's own is there, unless loading it has failed before (S11).
        facts = machine.packages.get(backend.name)
        return facts is None or facts.import_error is None
    facts = machine.packages.get(backend.package.key)
    minimum = backend.package.min_version
    # A version that isn't known is none that serves.
    return (
        facts is not None
        and facts.import_error is None
        and (minimum is None or is_at_least(facts.version, minimum) is True)
    )


def serving(
    need: AttentionRequirements, machine: MachineFacts, supported: frozenset[str] | None, backends: Backends
) -> list[str]:
    """The backends that a person could choose for these layers."""
    return [
        name
        for name, backend in backends.items()
        if (supported is None or name in supported)
        and has_capabilities(backend, need)
        and is_there(backend, machine)
        and not backend.why_not(need, machine)
    ]


def reason_to_fall_back(
    need: AttentionRequirements, wish: BackendPreference | None, first: AttentionBackend | None
) -> str | None:
    """Rule S5. `first` is the preferred backend, if it is one."""
    if wish is None:
        return "platform default"
    is_for_self = need.role == "cross" and first is not None and (first.is_sparse or first.self_only)
    if is_for_self and wish.names != f"{need.component}.{need.role}":
        return "dense cross-attention fallback"
    if not wish.explicit:
        return "platform default fallback"
    return f"not required for {need.component}" if need.is_auxiliary and wish.names == "" else None


def kind_of_error(error: SelectionError) -> type[SelectionError]:
    """Rule S9's order, from the verdicts that the error carries."""
    kinds = {reason["kind"] for verdict in error.details["rejected"] for reason in verdict["reasons"]}
    order = [
        ({"capability"}, CapabilityError),
        ({"scope", "unknown"}, BackendNotSupportedError),
        ({"platform", "arch", "package"}, BackendUnavailableError),
    ]
    return next((kind for members, kind in order if kinds & members), NoBackendError)


def check_promises(
    need: AttentionRequirements,
    machine: MachineFacts,
    preference: BackendPreference | None,
    supported: frozenset[str] | None,
    backends: Backends,
    in_another_order: Backends,
) -> None:
    """Select, and assert every promise about what comes out. The preference is one that is given for this layer."""
    usable = [name for name in backends if not why_not(name, need, machine, backends, supported, is_explicit=True)]
    assert usable == serving(need, machine, supported, backends)
    result = _outcome(need, machine, preference, supported, backends)
    again = _outcome(need, machine, preference, supported, in_another_order)
    assert type(again) is type(result) and again.to_json() == result.to_json(), "the order of registration matters"

    fitting = [name for name in usable if not (backends[name].is_sparse or backends[name].is_lossy)]
    wish = None if preference is None or preference.backend == "auto" else preference
    asked = None if wish is None else wish.backend
    if asked is not None and asked not in backends:
        asked = next((name for name in sorted(backends) if asked in backends[name].aliases), asked)
    is_explicit = wish is not None and wish.explicit
    fallback = reason_to_fall_back(need, wish, backends.get(asked or ""))

    if asked in (usable if is_explicit else fitting):
        assert isinstance(result, Selection) and result.backend == asked, "what is asked for fits, and isn't taken"
        assert result.reason is None
    elif fallback is not None and fitting:
        assert isinstance(result, Selection), "nothing was asked for strictly, and a dense backend fits"
        assert result.backend in fitting and result.reason == fallback
    else:
        assert isinstance(result, SelectionError), "nothing fits, or an explicit choice is swapped"

    if isinstance(result, SelectionError):
        assert type(result) is kind_of_error(result)
        assert json.loads(json.dumps(result.to_json())) == result.to_json()
        assert type(error_from_json(result.to_json())) is type(result)
        assert all(verdict["reasons"] for verdict in result.details["rejected"])
        assert sorted(result.details["would_do"]) == sorted(usable)
    else:
        assert result.preference == wish
        assert Selection.from_json(json.loads(json.dumps(result.to_json()))) == result
        assert [verdict.backend for verdict in result.verdicts if not verdict.reasons] == [result.backend]
        assert result.verdicts[-1].backend == result.backend
        assert len({verdict.backend for verdict in result.verdicts}) == len(result.verdicts)
        assert all(reason.detail for verdict in result.rejected for reason in verdict.reasons)


def _outcome(*arguments) -> Selection | SelectionError:
    try:
        return select_backend(*arguments)
    except SelectionError as error:
        return error
