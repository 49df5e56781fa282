"""model_index.json: which pipeline a model's folder holds, and the class of each component."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safelight.errors import CheckpointError
from safelight.weights.reading import read_json

MODEL_INDEX = "model_index.json"
# What a component's folder holds besides weights is part of a digest as a whole, where it isn't larger than this.
_DIGESTED_BYTES = 64_000_000
_SINGLE_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")


@dataclass(frozen=True, kw_only=True)
class ModelIndex:
    """A model_index.json. The model's family is `class_name`, whatever the folder is called.

    `components` maps a name to (library, class); one that the model does without (null) isn't in it. `settings` are
    the pipeline's own values, such as Wan 2.2's "boundary_ratio".
    """

    path: Path
    class_name: str
    components: Mapping[str, tuple[str, str]]
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", MappingProxyType(dict(self.components)))
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    def folder(self, component: str) -> Path:
        """A component's folder. Raises CheckpointError where the index's key or the folder is missing."""
        if component not in self.components:
            raise CheckpointError(
                f"{self.path}: no component {component!r}; there are {', '.join(sorted(self.components)) or 'none'}",
                path=str(self.path),
                key=component,
            )
        folder = self.path.parent / component
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: missing: {self.path.name} names component {component!r} "
                f"({'.'.join(self.components[component])}); download the folder again",
                path=str(folder),
                key=component,
            )
        return folder


def read_model_index(folder: str | Path) -> ModelIndex:
    """The index of a model's folder.

    Raises CheckpointError that names file and key; where the file is missing it says which nearby folder has one.
    """
    path = Path(folder) / MODEL_INDEX
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: missing: {_where_instead(Path(folder))}", path=str(path))
    data = read_json(path)
    class_name = data.get("_class_name")
    if not isinstance(class_name, str) or not class_name:
        raise CheckpointError(
            f"{path}: key '_class_name' must name the pipeline's class, and is {class_name!r}",
            path=str(path),
            key="_class_name",
        )
    components: dict[str, tuple[str, str]] = {}
    settings: dict[str, Any] = {}
    for key, value in data.items():
        if key.startswith("_"):
            continue
        match value:
            case [str(library), str(kind)] if library and kind:
                components[key] = (library, kind)
            case [None, _]:
                pass
            case list() if any(isinstance(part, str) for part in value):
                raise CheckpointError(
                    f"{path}: key {key!r} must be [library, class] or [null, null], and is {value!r}",
                    path=str(path),
                    key=key,
                )
            case _:
                settings[key] = value
    return ModelIndex(path=path, class_name=class_name, components=components, settings=settings)


def folder_digest(folder: Path) -> str:
    """What tells two copies of a model apart without reading the weights.

    That is the model's index, and of each component the weights' sizes and everything else as it is.
    """
    index = read_model_index(folder)
    digest = hashlib.sha256()
    files = [path for component in sorted(index.components) for path in sorted((folder / component).glob("*"))]
    for path in (folder / MODEL_INDEX, *filter(Path.is_file, files)):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
        if path.suffix != ".safetensors" and size <= _DIGESTED_BYTES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _where_instead(folder: Path) -> str:
    """What to pass instead of a folder without an index."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"{folder} can't be listed ({error.strerror})"
    inside = [folder / name for name in names]
    inside += sorted((folder / "snapshots").glob("*"))  # a hub cache's folder for one model
    models = [str(path) for path in inside if (path / MODEL_INDEX).is_file()]
    if models:
        return f"pass the folder that has one: {', '.join(models[:4])}"
    if (folder.absolute().parent / MODEL_INDEX).is_file():
        return f"this is one component's folder; pass the model's: {folder.absolute().parent}"
    files = [name for name in names if name.endswith(_SINGLE_FILES)]
    if files:
        return f"{files[0]} may be a single-file checkpoint; what is read is a folder in diffusers' layout"
    return "a model is a folder in diffusers' layout, with one folder per component"
