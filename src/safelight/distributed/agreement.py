"""Before work starts, the ranks compare what they are about to do: a mismatch is an error that names it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from safelight.distributed.links import GroupLink
from safelight.errors import AgreementError, SafelightError
from safelight.request import CancelToken

T = TypeVar("T")


def agree(link: GroupLink, make: Callable[[], T], values: Callable[[T], Mapping[str, Any]]) -> T:
    """What `make()` gives, after comparing with the other ranks what `values` says of it: plain data by name.

    Every rank calls this at the same time. Raises what `make` raises where all ranks raise the same, and AgreementError
    on every rank where they don't, or have unequal values; told are the first rank's.
    """
    error: SafelightError | None = None
    made: list[T] = []
    mine: dict[str, Any]
    try:
        made.append(make())
        mine = {**values(made[0]), "error": None}
    except SafelightError as raised:
        error, mine = raised, {"error": raised.message}
    everywhere = link.gather_values(mine)
    first = everywhere[0]
    # Where some have failed, what the others have says nothing.
    names = ["error"] if any(theirs["error"] is not None for theirs in everywhere) else list(first)
    problems = [
        f"{name} is {_shown(theirs.get(name))} on rank {rank} and {_shown(first.get(name))} on rank 0"
        for name in names
        for rank, theirs in enumerate(everywhere)
        if theirs.get(name) != first.get(name)
    ]
    if problems:
        raise AgreementError(
            f"the ranks don't agree: {'; '.join(problems)}; start all of them with the same command on the same model, "
            "and where their machines differ name kernels that all of them have, with --attention",
            problems=problems,
        ) from error
    if error is not None:
        raise error
    return made[0]


class SharedCancel(CancelToken):
    """The cancel tokens of all ranks as one: each asks at the same time, and is told what any of them was told."""

    def __init__(self, link: GroupLink, own: CancelToken | None) -> None:
        super().__init__()
        self._link = link
        self._own = own

    @property
    def is_cancelled(self) -> bool:
        """Whether someone asked on any rank. Every rank calls this at the same time."""
        return any(self._link.gather_values(self._own is not None and self._own.is_cancelled))


def _shown(value: Any) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
