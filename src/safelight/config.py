"""Settings: what a person set outside the command line, and where. The only reader of the environment.

| variable | holds |
|---|---|
| `SAFELIGHT_MODEL` | a model's path or hub id |
| `SAFELIGHT_ATTENTION` | choices separated by commas: `sdpa`, or `transformer.self=flash3,text_encoder=sdpa` |
| `SAFELIGHT_DEVICE` | `cuda`, `cuda:1`, `rocm`, `mps`, `cpu`, ...: checked when the machine is asked |
| `SAFELIGHT_DTYPE` | `float32`, `bfloat16` or `float16` |
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from safelight.errors import RequestError

T = TypeVar("T")

DTYPES = ("float32", "bfloat16", "float16")
# The roles of attention/requirements.py, which is a higher layer; a test holds the two together.
ROLES = ("self", "cross", "joint")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value and where it was set, in words: "`SAFELIGHT_MODEL`"."""

    value: T
    source: str


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """An attention backend that a person chose. `names` is what for: "" everything, "vae", or "transformer.self"."""

    names: str
    backend: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting; None, or an empty tuple, where nothing was set."""

    model: Setting[str] | None = None
    attention: tuple[AttentionChoice, ...] = ()
    device: Setting[str] | None = None
    dtype: Setting[str] | None = None

    @classmethod
    def from_environment(cls) -> Self:
        """The settings of this process's environment."""
        return cls.read(os.environ)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """The settings of an environment; RequestError with everything that is wrong in it.

        A variable that is set but empty is refused, since it can't be told from a slip.
        """
        problems: list[str] = []

        def setting(variable: str) -> Setting[str] | None:
            return Setting(environ[variable], f"`{variable}`") if variable in environ else None

        model, attention, dtype = map(setting, ("SAFELIGHT_MODEL", "SAFELIGHT_ATTENTION", "SAFELIGHT_DTYPE"))
        if model is not None and not model.value.strip():
            problems.append(f"{model.source} is {model.value!r}; give a model's path or hub id, or unset it")
        if dtype is not None and dtype.value not in DTYPES:
            problems.append(f"{dtype.source} is {dtype.value!r}; it must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
        choices: tuple[AttentionChoice, ...] = ()
        if attention is not None:
            try:
                choices = parse_attention(attention.value, attention.source)
            except RequestError as error:
                problems.append(error.message)
        if problems:
            raise RequestError("; ".join(problems), problems=problems)
        return cls(model=model, attention=choices, device=setting("SAFELIGHT_DEVICE"), dtype=dtype)


def parse_attention(text: str | Sequence[str], source: str) -> tuple[AttentionChoice, ...]:
    """The choices in a text such as "sdpa" or "transformer.self=flash3,text_encoder=sdpa", in its order.

    The values of a repeated option are given together, as a sequence, so that a WHERE in two of them is noticed.
    Whether there is such a component or backend is not known here. Raises RequestError.
    """
    parts = [part.strip() for value in ([text] if isinstance(text, str) else text) for part in value.split(",")]
    pairs = []
    for part in parts:
        names, equals, backend = part.rpartition("=")
        pairs.append((part, names.strip() if equals else None, backend.strip()))
    return _choices(pairs, source)


def attention_choices(choices: Mapping[str, str], source: str) -> tuple[AttentionChoice, ...]:
    """The choices in a mapping such as {"transformer.self": "flash3"}; the key "" means everything."""
    pairs = [(f"{names}={backend}", names or None, backend) for names, backend in choices.items()]
    return _choices(pairs, source)


def _choices(pairs: Iterable[tuple[str, str | None, str]], source: str) -> tuple[AttentionChoice, ...]:
    """Check (as written, WHERE or None for everything, backend) and make choices of it."""
    choices: dict[str, AttentionChoice] = {}
    problems: list[str] = []
    for written, where, backend in pairs:
        names = where or ""
        if not isinstance(backend, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", backend):
            problems.append(f"{written!r} names no backend; write NAME or WHERE=NAME, as in transformer.self=sdpa")
        elif where is not None and (problem := _wrong_where(where)):
            problems.append(f"{written!r}: {problem}")
        elif names in choices:
            problems.append(
                f"{names or 'everything'} is given both {choices[names].backend!r} and {backend!r}; keep one of them"
            )
        else:
            choices[names] = AttentionChoice(names=names, backend=backend, source=source)
    if problems:
        raise RequestError(f"{source}: {'; '.join(problems)}", problems=problems)
    return tuple(choices.values())


def _wrong_where(where: str) -> str | None:
    if where in ROLES:
        return f"{where!r} is a role; name its component too, as in transformer.{where}"
    component, dot, role = where.partition(".")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", component):
        return f"{where!r} must be COMPONENT or COMPONENT.ROLE, as in transformer or transformer.self"
    if dot and role not in ROLES:
        return f"{role!r} is no role; the roles are {', '.join(ROLES)}"
    return None
