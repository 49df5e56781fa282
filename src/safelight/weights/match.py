"""Which stored tensor goes where in a module: decided from names, shapes and dtypes alone, without torch.

Every name must match. What doesn't fit is collected and refused as a whole, before a byte of a tensor is read.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from safelight.errors import CheckpointError
from safelight.weights.header import TensorEntry

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_WEIGHT = ".weight"
_SCALES = (".weight_scale", ".scale_weight")  # both spellings are in use; the stored weight times it is the weight
_INPUT_SCALES = (".input_scale", ".scale_input")  # for float8 activations, which nothing here computes with
_SHOWN = 8  # how many of many names a message shows


@dataclass(frozen=True)
class Slot:
    """What a module has at one name: the shape, and the dtype in safetensors' spelling."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One stored tensor and the names in the module that it fills (several: tied).

    `scale` is the key of a float8 weight's scale. `copies` are keys of the same tied tensor, stored again: they must
    be equal bit for bit.
    """

    key: str
    names: tuple[str, ...]
    scale: str | None = None
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Match:
    """Where everything goes, and the stored tensors that nothing needs."""

    placements: tuple[Placement, ...]
    skipped: tuple[str, ...] = ()


def match_tensors(
    entries: Mapping[str, TensorEntry],
    slots: Mapping[str, Slot],
    *,
    described: str,
    tied: Iterable[tuple[str, ...]] = (),
    skip_prefixes: tuple[str, ...] = (),
    rename: Callable[[str], str] | None = None,
) -> Match:
    """Match stored tensors to a module's slots.

    `skip_prefixes` are of the files' own names, whose tensors the module does without; `rename` turns a file's name
    into the module's; `tied` groups are the module's names (renamed ones), of which any may be stored. `described`
    names files and module in the error. Raises CheckpointError with all that is missing, unexpected, misshapen or in
    an unsupported dtype.
    """
    skipped = [key for key in entries if key.startswith(skip_prefixes)] if skip_prefixes else []
    scales = _scales(entries)
    keys: dict[str, str] = {}
    trouble: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshapen": [], "unsupported": []}
    for key in sorted(entries.keys() - set(skipped) - scales.keys()):
        name = key if rename is None else rename(key)
        if name in keys:
            trouble["unexpected"].append(f"{key} (becomes {name}, as {keys[name]} does)")
        keys.setdefault(name, key)
    placements = []
    for group in _groups(slots, tied):
        targets = tuple(name for name in group if name in slots)
        stored = [keys.pop(name) for name in group if name in keys]
        if not stored:
            others = [name for name in group if name != targets[0]]
            trouble["missing"].append(targets[0] + (f" (or, tied to it, {' or '.join(others)})" if others else ""))
            continue
        of_weight = [scale for scale, weight in scales.items() if weight == stored[0] and scale.endswith(_SCALES)]
        for key in stored:
            _compare(key, entries, targets, slots, of_weight, trouble)
        scale = of_weight[0] if of_weight else None
        placements.append(Placement(key=stored[0], names=targets, scale=scale, copies=tuple(stored[1:])))
    trouble["unexpected"] += sorted(keys.values())
    if any(trouble.values()):
        raise _mismatch(described, trouble)
    inputs = [key for key in scales if key.endswith(_INPUT_SCALES)]
    return Match(placements=tuple(placements), skipped=tuple(sorted({*skipped, *inputs})))


def _scales(entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The scales of float8 weights: the scale's key to the weight's."""
    found = {}
    for key, entry in entries.items():
        if entry.dtype in _FLOAT8 and key.endswith(_WEIGHT):
            stem = key.removesuffix(_WEIGHT)
            found.update({stem + end: key for end in _SCALES + _INPUT_SCALES if stem + end in entries})
    return found


def _groups(slots: Mapping[str, Slot], tied: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Every slot in exactly one group: groups of tied names that overlap are one, and any other slot is alone."""
    merged: list[tuple[str, ...]] = []
    for group in tied:
        touching = [other for other in merged if set(other) & set(group)]
        merged = [other for other in merged if other not in touching]
        merged.append(tuple(dict.fromkeys(name for part in [*touching, group] for name in part)))
    merged = [group for group in merged if any(name in slots for name in group)]
    grouped = {name for group in merged for name in group}
    return merged + [(name,) for name in slots if name not in grouped]


def _compare(
    key: str,
    entries: Mapping[str, TensorEntry],
    targets: tuple[str, ...],
    slots: Mapping[str, Slot],
    scales: list[str],
    trouble: dict[str, list[str]],
) -> None:
    """Add what is wrong with one stored tensor for its slots."""
    entry = entries[key]
    for name in targets:
        slot = slots[name]
        called = key if key == name else f"{key} (for {name})"
        if entry.shape != slot.shape:
            trouble["misshapen"].append(
                f"{called} is {list(entry.shape)} in the file and {list(slot.shape)} in the model"
            )
        elif slot.dtype not in FLOATS:
            if entry.dtype != slot.dtype:
                trouble["unsupported"].append(f"{called} is {entry.dtype} in the file and {slot.dtype} in the model")
        elif entry.dtype in _FLOAT8:
            problem = _scale_problem(entry, [(scale, entries[scale]) for scale in scales], key)
            if problem is not None:
                trouble["unsupported"].append(f"{called} is {entry.dtype}, {problem}")
        elif entry.dtype not in FLOATS:
            trouble["unsupported"].append(f"{called} is {entry.dtype}: quantised weights aren't supported")


def _scale_problem(weight: TensorEntry, scales: list[tuple[str, TensorEntry]], key: str) -> str | None:
    """Why a float8 weight can't be turned back into numbers, or None."""
    stem = key.removesuffix(_WEIGHT)
    if not scales:
        return f"and its scale is missing ({' or '.join(stem + end for end in _SCALES)}): its values mean nothing alone"
    if len(scales) > 1:
        return f"and has two scales, {' and '.join(name for name, _ in scales)}"
    name, scale = scales[0]
    per_row = scale.shape[:1] == weight.shape[:1] != () and math.prod(scale.shape) == weight.shape[0]
    if scale.dtype not in FLOATS or not (math.prod(scale.shape) == 1 or per_row):
        return f"and its scale {name} is {scale.dtype} {list(scale.shape)}: one float, or one per row, is supported"
    return None


def _mismatch(described: str, trouble: Mapping[str, list[str]]) -> CheckpointError:
    lines = [f"{described} don't fit together:"]
    for title, items in trouble.items():
        if items:
            rest = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
            lines.append(f"  {len(items)} {title}: {', '.join(items[:_SHOWN])}{rest}")
    lines.append("Weights and config.json must be of one model: download the folder again, or correct the wrong one")
    return CheckpointError("\n".join(lines), **{title: items for title, items in trouble.items() if items})
