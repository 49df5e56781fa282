"""Functions with a vendor's recorded signature: every call is bound to it, keyword by keyword, and kept."""

import ast
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("signatures.json").read_text())


class NotRecorded(AssertionError):
    """A call that the vendor's function, as it was recorded, would refuse, swallow or take for something else."""


@dataclass(frozen=True)
class Opaque:
    """A default that is no literal, by its source text."""

    text: str


@dataclass(frozen=True)
class Call:
    """One call: the record's name, and every parameter's value, defaults included."""

    function: str
    arguments: Mapping[str, Any]


@dataclass
class Recorder:
    """Makes functions from records and keeps the calls of all of them, in order."""

    calls: list[Call] = field(default_factory=list)

    def function(self, record: str, body: Callable[..., Any]) -> Callable[..., Any]:
        """A function with the signature of that record, which computes by `body`.

        `body` names the parameters that it honours. Every other one has to be left at its default: a vendor would do
        something with it that the body doesn't. An argument that only a `**kwargs` would take is refused, too.
        """
        signature = signature_of(record)
        honoured = set(inspect.signature(body).parameters)
        unknown = honoured - set(signature.parameters)
        assert not unknown, f"{record} has no parameter {unknown}"

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise NotRecorded(f"{record}: {error}") from error
            for name, parameter in signature.parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD and bound.arguments.get(name):
                    raise NotRecorded(f"{record} swallows {sorted(bound.arguments[name])} without using it")
            bound.apply_defaults()
            self.calls.append(Call(record, dict(bound.arguments)))
            for name, parameter in signature.parameters.items():
                if name in honoured or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    continue
                value = bound.arguments[name]
                if value is not parameter.default and value != parameter.default:
                    raise NotRecorded(f"{record}: this stand-in doesn't know {name}={value!r}")
            return body(**{name: bound.arguments[name] for name in honoured})

        stand_in.__signature__ = signature  # type: ignore[attr-defined]
        stand_in.__name__ = stand_in.__qualname__ = record.rpartition(".")[2]
        return stand_in


def signature_of(record: str) -> inspect.Signature:
    """The signature of a record of signatures.json, with defaults that are no literals as Opaque."""
    parameters = []
    for name, kind, *default in RECORDS[record]["parameters"]:
        value = _default(default[0]) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value))
    return inspect.Signature(parameters)


def _default(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return Opaque(text)
