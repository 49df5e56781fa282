"""Which files hold a component's weights: found by a fixed preference, then checked, without torch.

The preference for a stem ("diffusion_pytorch_model", "model") and a variant (None, or a name such as "fp16"):

1. the variant's one file, `STEM[.VARIANT].safetensors`;
2. the variant's shards, named by `STEM.safetensors.index[.VARIANT].json`;
3. nothing else. Another variant, a differently named file, shards without their index: refused, with what is there.

Where 1 and 2 are both there they must hold the same tensors bit for bit (1 is taken); otherwise nobody can say which
is meant, and both are refused. Pickle files are never opened. The order of the directory plays no part.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from safelight.errors import CheckpointError
from safelight.weights.header import TensorEntry, read_header, same_bytes
from safelight.weights.reading import read_json, unreadable

STEMS = ("diffusion_pytorch_model", "model")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 8  # how many of many names a message shows


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """The files that hold one component's weights.

    `weight_map` is the index's word on which file holds a tensor, empty where there is no index. `notes` say what
    lies in the folder and isn't read, for a person.
    """

    folder: Path
    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: Mapping[str, str] = field(default_factory=dict)
    variant: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight_map", MappingProxyType(dict(self.weight_map)))


def find_weights(
    component_folder: str | Path, stem: str = "diffusion_pytorch_model", variant: str | None = None
) -> WeightFiles:
    """The files of a component, by the preference on top of this file.

    Raises CheckpointError that names the folder or file: missing, ambiguous, pickle only, another variant only, or an
    index that names shards which aren't there. Reads no tensor, except to compare duplicates.
    """
    folder = Path(component_folder)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {unreadable(folder, error)}", path=str(folder)) from error
    suffix = f".{variant}" if variant else ""
    single, index = f"{stem}{suffix}.safetensors", f"{stem}.safetensors.index{suffix}.json"
    weight_map: dict[str, str] = {}
    if index in names:
        weight_map = _read_index(folder / index)
        _require_shards(folder / index, set(weight_map.values()) - set(names), single if single in names else None)
    shards = tuple(folder / name for name in sorted(set(weight_map.values())))
    if single in names:
        if shards:
            _require_equal(folder / single, folder / index, shards)
        notes = _notes(names, {single}, single, stem, variant)
        return WeightFiles(folder=folder, files=(folder / single,), variant=variant, notes=notes)
    if shards:
        notes = _notes(names, {index, *weight_map.values()}, index, stem, variant)
        return WeightFiles(
            folder=folder, files=shards, index=folder / index, weight_map=weight_map, variant=variant, notes=notes
        )
    raise CheckpointError(_nothing_found(folder, names, stem, variant), path=str(folder))


def read_headers(files: WeightFiles) -> dict[str, TensorEntry]:
    """Every tensor in a component's files, by name; the whole check that needs no model.

    Raises CheckpointError with everything wrong: each broken file, a tensor that isn't in the shard that the index
    names, a tensor that two files hold.
    """
    problems: list[str] = []
    entries: dict[str, TensorEntry] = {}
    for file in files.files:
        try:
            header = read_header(file)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        twice = sorted(entries.keys() & header.keys())
        problems += [f"{file}: tensor {name!r} is also in {entries[name].file.name}" for name in twice]
        entries.update(header)
    if not problems:
        misplaced = [
            name for name, shard in files.weight_map.items() if name not in entries or entries[name].file.name != shard
        ]
        problems += [f"{files.index}: tensor {name!r} isn't in {files.weight_map[name]}" for name in misplaced[:_SHOWN]]
        if len(misplaced) > _SHOWN:
            problems.append(f"and {len(misplaced) - _SHOWN} more tensors that aren't where the index says")
    if problems:
        raise CheckpointError("\n".join(problems), path=str(files.folder), problems=problems)
    return entries


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: bad index: key 'weight_map' must name each tensor's file", path=str(index))
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", ".", "..") or re.search(r"[/\\\0]", shard):
            raise CheckpointError(
                f"{index}: bad index: weight_map[{name!r}] is {shard!r}, not the name of a file beside it",
                path=str(index),
            )
    return weight_map


def _require_shards(index: Path, missing: set[str], single: str | None) -> None:
    if not missing:
        return
    remedy = "download the folder again"
    if single is not None:
        remedy += f", or remove the index to load {single}, which is there"
    raise CheckpointError(
        f"{index}: names shards that are missing: {', '.join(sorted(missing))}; {remedy}",
        path=str(index),
        missing=sorted(missing),
    )


def _require_equal(single: Path, index: Path, shards: tuple[Path, ...]) -> None:
    difference = _difference(single, shards)
    if difference is not None:
        raise CheckpointError(
            f"{single.parent}: ambiguous: {single.name} and {index.name} are both there, and they differ: "
            f"{difference}; remove the one that isn't meant",
            path=str(single.parent),
            candidates=[single.name, index.name],
        )


def _difference(single: Path, shards: tuple[Path, ...]) -> str | None:
    """The first difference between one file and the shards beside it, or None."""
    one = read_header(single)
    many = read_headers(WeightFiles(folder=single.parent, files=shards))
    alone = sorted(one.keys() ^ many.keys())
    if alone:
        return f"{alone[0]!r} is only in {single.name if alone[0] in one else many[alone[0]].file.name}"
    for name in sorted(one):
        if not same_bytes(one[name], many[name]):
            return f"{name!r} has other values in {single.name} than in {many[name].file.name}"
    return None


def _variant_of(name: str, stem: str) -> str | None:
    """The variant in a weight file's or an index's name; "" for the plain ones, None for any other file."""
    shard = r"-\d{5}-of-\d{5}"
    found = re.fullmatch(
        rf"{re.escape(stem)}(?:(?:\.(?P<a>[^.]+?))?(?:{shard})?(?:\.(?P<b>[^.]+))?\.safetensors"
        r"|\.safetensors\.index(?:\.(?P<c>[^.]+))?\.json)",
        name,
    )
    return None if found is None else found["a"] or found["b"] or found["c"] or ""


def _notes(names: list[str], chosen: set[str], source: str, stem: str, variant: str | None) -> tuple[str, ...]:
    """What lies in the folder, looks like weights and isn't read."""
    notes = []
    for name in names:
        found = _variant_of(name, stem)
        if name in chosen:
            continue
        if name.endswith(_PICKLES):
            notes.append(f"{name} is ignored: pickle files are never opened")
        elif found is not None and found != (variant or ""):
            notes.append(f"{name} is ignored: it is {_variant_text(found)}")
        elif found is not None or name.endswith(".safetensors"):
            notes.append(f"{name} is ignored: the weights are those of {source}")
    return tuple(notes)


def _variant_text(variant: str) -> str:
    return f"variant {variant!r}" if variant else "the plain variant"


def _nothing_found(folder: Path, names: list[str], stem: str, variant: str | None) -> str:
    """Why the folder has no weights to load: all that is there instead, and the remedies."""
    suffix = f".{variant}" if variant else ""
    single, index = f"{stem}{suffix}.safetensors", f"{stem}.safetensors.index{suffix}.json"
    text = [f"{folder}: no weights: neither {single} nor {index} is there"]
    variants = {name: _variant_of(name, stem) for name in names}
    same = [name for name, found in variants.items() if found == (variant or "")]
    others = sorted({_variant_text(found) for found in variants.values() if found not in (None, variant or "")})
    strange = [name for name in names if name.endswith(".safetensors") and variants[name] is None]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if same:
        text.append(f"{', '.join(same[:_SHOWN])} needs its index, {index}: download it as well")
    if others:
        text.append(f"there is {', '.join(others)}: ask for it by name")
    if strange:
        text.append(f"{', '.join(strange[:_SHOWN])} has another name: rename it if it is the one that is meant")
    if pickles:
        text.append(
            f"{', '.join(pickles[:_SHOWN])} is a pickle file, which runs code when it is opened: convert it to "
            "safetensors where you trust it (diffusers and transformers: save_pretrained)"
        )
    return "; ".join(text)
