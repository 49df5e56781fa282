"""Every error Safelight raises on purpose.

    SafelightError                    root: catch this
    ├── RequestError                  the person asked for something that can't be done: exit status 2
    │   ├── CheckpointError           the model's files: missing, short, malformed, or not what the config says
    │   ├── AgreementError            ranks were started with unlike requests or models; all of them raise it
    │   ├── OutputError               where the result should go: unwritable, or there already
    │   └── SelectionError            no attention backend for a layer; carries every verdict
    │       ├── CapabilityError           the kernel can't do what the layer needs
    │       ├── BackendNotSupportedError  the layer doesn't take this backend, or the name is unknown
    │       ├── BackendUnavailableError   wrong hardware, or the package is missing or broken
    │       └── NoBackendError            nothing at all fits
    ├── GenerationError               the run itself failed: exit status 1
    │   ├── KernelError               an attention kernel raised while running; names component, layer and step
    │   ├── KernelMismatchError       an attention kernel's result isn't the reference's (`--check-attention`)
    │   ├── RankError                 another rank of a parallel run has ended, or doesn't answer
    │   ├── RankEndedError            a rank of a parallel run died without a word, or hangs
    │   └── WriteError                the file couldn't be written (disk full, device gone)
    └── Cancelled                     the request's cancel token was set: exit status 130

A message says what was asked, what was found, what is allowed and the remedy. Errors survive JSON: `to_json` and
`error_from_json`.
"""

from collections.abc import Iterator
from typing import Any


class SafelightError(Exception):
    """Root of all errors that Safelight raises on purpose."""

    exit_status = 1

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def to_json(self) -> dict[str, Any]:
        """The error as plain data: its class name, message and details."""
        return {"error": type(self).__name__, "message": self.message, "details": self.details}


class RequestError(SafelightError):
    """The request or the command line is wrong; nothing was started."""

    exit_status = 2


class CheckpointError(RequestError):
    """The model's files don't hold what its configuration says."""


class OutputError(RequestError):
    """The result can't go where it was asked to go."""


class AgreementError(RequestError):
    """The ranks of a parallel run were started with unlike requests or models. All of them raise it."""


class SelectionError(RequestError):
    """No attention backend for a layer. `details["rejected"]` holds every candidate's reasons."""


class CapabilityError(SelectionError):
    """The asked backend can't do what the layer needs."""


class BackendNotSupportedError(SelectionError):
    """The layer doesn't take the asked backend, or nothing has that name."""


class BackendUnavailableError(SelectionError):
    """The asked backend can't run on this machine: hardware, or its package."""


class NoBackendError(SelectionError):
    """Nothing was asked, and nothing fits the layer."""


class GenerationError(SafelightError):
    """The run failed after it had started."""


class KernelError(GenerationError):
    """An attention kernel raised while running."""


class KernelMismatchError(GenerationError):
    """A checked attention kernel disagrees with the reference. `details` say where and by how much."""


class RankError(GenerationError):
    """Another rank of a parallel run has ended or doesn't answer. That rank's own error says why."""


class RankEndedError(GenerationError):
    """A rank of a parallel run died without a word, or hangs. `details["status"]` is its exit status, if it has one.

    The run's exit status is that of the rank, for a signal 128 more than its number, as a shell has it.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        status: int | None = details.get("status")
        self.exit_status = 1 if not status else status if status > 0 else 128 - status


class WriteError(GenerationError):
    """A result couldn't be written."""


class Cancelled(SafelightError):
    """The request was cancelled."""

    exit_status = 130


def _tree(root: type[SafelightError]) -> Iterator[type[SafelightError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def error_from_json(data: dict[str, Any]) -> SafelightError:
    """Rebuild an error from `to_json` data; an unknown class name gives the root."""
    kinds = {kind.__name__: kind for kind in _tree(SafelightError)}
    return kinds.get(data["error"], SafelightError)(data["message"], **data["details"])
