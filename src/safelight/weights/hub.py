"""From what a person calls a model to a folder: a local path as it is, or a hub id through huggingface_hub.

Only `owner/name` that is no file or folder here is looked up on the hub. Everything else is a path, and a path that
isn't there is an error: nothing about it leaves the machine.
"""

import os
import re
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from safelight.errors import CheckpointError
from safelight.weights.files import STEMS
from safelight.weights.model_index import MODEL_INDEX, read_model_index

_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")


def resolve_model(
    model: str | Path,
    *,
    offline: bool = False,
    revision: str | None = None,
    variant: str | None = None,
    only_configs: bool = False,
) -> Path:
    """The folder of a model.

    A string may be a path ("~" is the home folder) or a hub id `owner/name`; a Path is always a path. A folder that
    exists is returned as it is. `offline` reads the hub's local cache alone; so does HF_HUB_OFFLINE=1. `revision` and
    `variant` choose among a hub model's files: only the pipeline's own components are downloaded, without the other
    variants, and with `only_configs` their configurations alone. Raises CheckpointError.
    """
    text = os.fspath(model)
    if not text.strip():
        raise CheckpointError("the model's name is empty: pass a folder, or a hub id owner/name", model=text)
    path = Path(os.path.expanduser(text))
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        if is_absent and isinstance(model, str) and _HUB_ID.fullmatch(text):
            return _from_hub(text, offline=offline, revision=revision, variant=variant, only_configs=only_configs)
        raise CheckpointError(_no_such_folder(model, path, error), model=text) from error
    if stat.S_ISDIR(mode):
        return path
    rule = f"pass its folder, {path.parent}" if path.name == MODEL_INDEX else f"a model is a folder with {MODEL_INDEX}"
    raise CheckpointError(f"model {text!r} is a file; {rule}", model=text)


def _no_such_folder(model: str | Path, path: Path, error: OSError | ValueError) -> str:
    cause = error.strerror if isinstance(error, OSError) else str(error)
    place = "" if path.is_absolute() else f" (in {Path.cwd()})"
    rule = "a hub id has the form owner/name" if isinstance(model, str) else "a Path is never a hub id"
    return (
        f"model {os.fspath(model)!r}: no such folder{place}: {(cause or type(error).__name__).lower()}. "
        f"It was taken for a path and not looked up on the hub: {rule}"
    )


def _from_hub(model_id: str, *, offline: bool, revision: str | None, variant: str | None, only_configs: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # The root of the HTTP library's errors (requests, httpx, ... by huggingface_hub's release): a proxy's or a broken
    # connection's error arrives as that, and not every release makes it an OSError.
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    fetch = partial(snapshot_download, model_id, revision=revision, local_files_only=offline)
    try:
        # The index first: a model's repository may hold other copies of the weights, tens of gigabytes each.
        folder = Path(fetch(allow_patterns=[MODEL_INDEX]))
        if not (folder / MODEL_INDEX).is_file():
            raise CheckpointError(
                f"model {model_id!r}: the hub's model has no {MODEL_INDEX}: it isn't in diffusers' layout; the same "
                "model may be there in that layout under another name",
                model=model_id,
            )
        index = read_model_index(folder)
        files = (
            [f"{component}/config.json" for component in index.components]
            if only_configs
            else _patterns(index.components, variant)
        )
        return Path(fetch(allow_patterns=[MODEL_INDEX, *files]))
    except GatedRepoError as error:
        why = "gated: accept its terms on the hub and log in (hf auth login)"
        raise _refusal(model_id, why, error) from error
    except RepositoryNotFoundError as error:
        why = "not found on the hub: no such model, or a private one that needs a login (hf auth login)"
        raise _refusal(model_id, why, error) from error
    except RevisionNotFoundError as error:
        raise _refusal(model_id, f"the hub's model has no revision {revision!r}", error) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        is_off = offline or isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled)
        off = "the hub is switched off (offline, or HF_HUB_OFFLINE)"
        why = "not complete in the local cache, and " + (off if is_off else "the hub can't be reached")
        raise _refusal(model_id, why, error) from error
    except (OSError, ValueError, RuntimeError, transport) as error:
        raise _refusal(model_id, "the download failed", error) from error


def _patterns(components: Iterable[str], variant: str | None) -> list[str]:
    """The files that a model's components need, as the hub's glob patterns."""
    suffix = f".{variant}" if variant else ""
    shard = "-?????-of-?????"
    weights = [
        name
        for stem in STEMS
        for name in (
            f"{stem}{suffix}.safetensors",
            f"{stem}{shard}{suffix}.safetensors",
            f"{stem}{suffix}{shard}.safetensors",
        )
    ]
    names = ["*.json", "*.txt", "*.model", *dict.fromkeys(weights)]
    return [f"{component}/{name}" for component in components for name in names]


def _refusal(model_id: str, why: str, error: Exception) -> CheckpointError:
    cause = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
    return CheckpointError(
        f"model {model_id!r}: no folder of that name in {Path.cwd()}, so it was looked up on the hub: {why}. "
        f"Cause: {cause}. Or download it on another machine (hf download {model_id} --local-dir FOLDER) and pass "
        "the folder",
        model=model_id,
    )
