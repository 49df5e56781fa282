"""Before work starts, the ranks compare what they are about to do: a mismatch is an error that names it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safelight.distributed.links import GroupLink
from safelight.errors import AgreementError


def agree(link: GroupLink, values: Mapping[str, Any]) -> None:
    """Raise AgreementError on every rank unless all have equal values, plain data by name; told are the first rank's.

    Every rank calls this at the same time.
    """
    everywhere = link.gather_values(dict(values))
    problems = [
        f"{name} is {_shown(theirs.get(name))} on rank {rank} and {_shown(value)} on rank 0"
        for name, value in everywhere[0].items()
        for rank, theirs in enumerate(everywhere)
        if theirs.get(name) != value
    ]
    if problems:
        raise AgreementError(
            f"the ranks don't agree: {'; '.join(problems)}; start all of them with the same command on the same model",
            problems=problems,
        )


def folder_digest(folder: Path) -> str:
    """What tells two copies of a model apart without reading the weights: every JSON file, and the weights' sizes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".json":
            digest.update(f"{name}\n".encode() + path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
