"""forced_attention: choices that are nearer than any other, for the calls made inside a `with` block (rule S1)."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType

from safelight.config import AttentionChoice, attention_choices
from safelight.errors import SafelightError

SOURCE = "`forced_attention` scope"


@dataclass(frozen=True, eq=False)
class ForcedScope:
    """Attention choices that hold inside its `with` block; made by `forced_attention`.

    It keeps nothing of where it is entered, so one may be entered again, inside itself and in several threads.
    """

    choices: tuple[AttentionChoice, ...]

    def __enter__(self) -> None:
        _ENTERED.set((self, *_ENTERED.get()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Only this scope is taken out: a generator may leave its scope after another one was entered around it.
        entered = _ENTERED.get()
        if self in entered:
            position = entered.index(self)
            _ENTERED.set(entered[:position] + entered[position + 1 :])
        elif kind is None:
            raise SafelightError(
                f"a {SOURCE} was entered in one context (a thread, an asyncio task) and left in another, so what ran "
                "in between may not have had its choices; don't yield inside the block, or give the choices to each "
                "request as `attention`"
            )


# Immutable, and each context has its own: what is entered in a thread or an asyncio task is seen in no other.
_ENTERED: ContextVar[tuple[ForcedScope, ...]] = ContextVar("safelight.attention.scope", default=())


def forced_attention(attention: str | Mapping[str, str]) -> ForcedScope:
    """A scope for a `with` block: what is planned inside it prefers these backends to all that is said elsewhere.

    `attention` is a backend's name, or a mapping such as {"transformer.self": "flash3"}; "auto" forces that nothing is
    preferred. Inside another scope, that one still holds for what this one doesn't name. An asyncio task started inside
    has the scope too; a thread starts without it, unless it is run in a copied context (`asyncio.to_thread` does so).
    A generator that yields inside the block shares the scope with whoever runs it, so don't. Raises RequestError.
    """
    return ForcedScope(attention_choices(attention, SOURCE))


def forced_choices() -> tuple[tuple[AttentionChoice, ...], ...]:
    """The choices of the scopes that this call is made in, the innermost first."""
    return tuple(scope.choices for scope in _ENTERED.get())
