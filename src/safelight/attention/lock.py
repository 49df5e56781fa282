"""A locked plan (S14): read from a file, and how a plan that is to run differs from it."""

import json
from collections.abc import Iterator
from pathlib import Path

from safelight.attention.plan import AttentionPlan, PlannedLayer
from safelight.errors import RequestError
from safelight.platforms.facts import MachineFacts


def lock_text(plan: AttentionPlan) -> str:
    """A plan as the text of a lock file: the JSON of `explain`, for people to read too."""
    return json.dumps(plan.to_json(), indent=2) + "\n"


def read_lock(path: Path) -> AttentionPlan:
    """The plan in a file that `explain --lock` or `explain --json` wrote. Raises RequestError."""
    remedy = "write one with safelight explain --lock FILE"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"plan {path} can't be read: {error.strerror}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"plan {path} isn't JSON: {error}; {remedy}") from error
    try:
        return AttentionPlan.from_json(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"plan {path} isn't a plan that this version knows ({error!r}); {remedy}") from error


def check_lock(locked: AttentionPlan, plan: AttentionPlan) -> None:
    """Raise RequestError, with every difference, unless a plan runs the very kernels of a locked one."""
    found = differences(locked, plan)
    if found:
        listed = "".join(f"\n  {line}" for line in found)
        other = "" if locked.grid == plan.grid else "ask for its grid, or "
        raise RequestError(
            f"the attention plan isn't the locked one; {other}lock it anew with safelight explain --lock FILE:{listed}",
            differences=found,
        )


def differences(locked: AttentionPlan, plan: AttentionPlan) -> list[str]:
    """How a plan differs from a locked one, a line for each kind of layer; none where the same kernels run.

    What counts is which backend, with which options, runs for how many layers of which requirements. By whom it was
    preferred and for which reason doesn't. Where something differs, what changed in the machine's facts is added, as
    the likely cause.
    """
    before = {_kind(layer): layer for layer in locked.layers}
    after = {_kind(layer): layer for layer in plan.layers}
    if locked.grid != plan.grid:  # what layers ask for differs with it
        return [f"grid: locked {locked.grid}, now {plan.grid}"]
    found = []
    for kind in dict.fromkeys((*before, *after)):
        was, is_now = before.get(kind), after.get(kind)
        texts = ["none" if layer is None else _kernel(layer) for layer in (was, is_now)]
        if texts[0] != texts[1]:
            layer = is_now or was
            assert layer is not None
            line = f"{_name(layer)}: locked {texts[0]}, now {texts[1]}"
            why = _why_refused(was, is_now)
            found.append(f"{line} ({why})" if why else line)
    if found:
        found += [f"machine: {text}" for text in changed_facts(locked.machine, plan.machine)]
    return found


def _kind(layer: PlannedLayer) -> str:
    return json.dumps([layer.requirements.to_json(), sorted(layer.supported or ())], sort_keys=True)


def _kernel(layer: PlannedLayer) -> str:
    """What runs: "x30 flash3", with its options if it was given any."""
    preference = layer.selection.preference
    options = dict(preference.options) if preference is not None and layer.selection.reason is None else {}
    shown = "".join(f" {name}={value}" for name, value in sorted(options.items()))
    return f"x{layer.count} {layer.selection.backend}{shown}"


def _name(layer: PlannedLayer) -> str:
    need = layer.requirements
    return f"{need.component}.{need.role} (head_dim {need.head_dim}, {need.dtype}, {need.num_heads} heads)"


def _why_refused(was: PlannedLayer | None, is_now: PlannedLayer | None) -> str | None:
    """Why the locked backend is refused now, if it was asked at all."""
    if was is None or is_now is None:
        return None
    for verdict in is_now.selection.rejected:
        if verdict.backend == was.selection.backend:
            return f"{verdict.backend}: {' and '.join(reason.detail for reason in verdict.reasons)}"
    return None


def changed_facts(before: MachineFacts, after: MachineFacts) -> Iterator[str]:
    """How a machine's facts differ from earlier ones, in words. By itself that is no reason to refuse a lock."""
    old, new = before.to_json(), after.to_json()
    for name in old:
        if name not in ("packages", "env", "notes", "devices") and old[name] != new[name]:
            yield f"{name} was {old[name]}, is {new[name]}"
    arches = [[device.arch for device in machine.devices] for machine in (before, after)]
    if arches[0] != arches[1]:
        yield f"devices were {', '.join(arches[0]) or 'none'}, are {', '.join(arches[1]) or 'none'}"
    for group, missing in (("packages", "not installed"), ("env", "not set")):
        for key in sorted({*old[group], *new[group]}):
            was, is_now = (_fact(facts[group].get(key), missing) for facts in (old, new))
            if was != is_now:
                yield f"{key} was {was}, is {is_now}"


def _fact(value: object, missing: str) -> str:
    if isinstance(value, dict):
        broken = f", broken: {value['import_error']}" if value["import_error"] else ""
        variant = f" ({value['variant']})" if value["variant"] else ""
        parameters = "" if value["parameters"] is None else f" taking {', '.join(value['parameters'])}"
        return f"{value['dist']} {value['version']}{variant}{parameters}{broken}"
    return missing if value is None else str(value)
