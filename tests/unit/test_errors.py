"""The error tree: as drawn, through JSON and pickle, with its exit statuses."""

import copy
import inspect
import json
import pickle
import re

import pytest

from safelight import errors
from safelight.errors import Cancelled, GenerationError, RequestError, SafelightError, SelectionError, error_from_json

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


def drawn():
    """The (class, parent) pairs of the tree in the module's docstring."""
    pairs, above = [], {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"(    [│ ├└─]*)([A-Z][A-Za-z]+)  +\S", line)
        if match:
            depth = len(match[1])
            parents = [name for column, name in above.items() if column < depth]
            pairs.append((match[2], parents[-1] if parents else "Exception"))
            above = {column: name for column, name in above.items() if column < depth} | {depth: match[2]}
    return pairs


def test_the_tree_is_drawn_as_it_is() -> None:
    assert len(CLASSES) > 5
    assert sorted(drawn()) == sorted((kind.__name__, kind.__base__.__name__) for kind in CLASSES)


def test_exit_statuses_are_those_that_are_drawn() -> None:
    statuses = {match[1]: int(match[2]) for match in re.finditer(r"(\w+)  .*exit status (\d+)", errors.__doc__)}
    assert statuses == {"RequestError": 2, "GenerationError": 1, "Cancelled": 130}
    assert SafelightError.exit_status == 1
    for kind in CLASSES:
        drawn_for = [status for name, status in statuses.items() if issubclass(kind, getattr(errors, name))]
        assert [kind.exit_status] == (drawn_for or [1])


def test_the_persons_mistake_and_the_runs_failure_are_apart() -> None:
    assert issubclass(SelectionError, RequestError)
    for kind in (RequestError, GenerationError, Cancelled):
        assert [other for other in (RequestError, GenerationError, Cancelled) if issubclass(kind, other)] == [kind]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_survive_json_and_pickle(kind) -> None:
    error = kind(
        "asked for 7; found 5", layer="transformer.self", rejected=[{"backend": "sdpa", "reasons": []}], step=3
    )
    assert str(error) == error.message == "asked for 7; found 5"
    data = json.loads(json.dumps(error.to_json()))
    assert data == {
        "error": kind.__name__,
        "message": "asked for 7; found 5",
        "details": {"layer": "transformer.self", "rejected": [{"backend": "sdpa", "reasons": []}], "step": 3},
    }
    for again in (error_from_json(data), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert again.to_json() == data
        assert again.exit_status == kind.exit_status


def test_an_error_without_details() -> None:
    assert SafelightError("no").to_json() == {"error": "SafelightError", "message": "no", "details": {}}


def test_a_class_that_is_not_known_here_is_the_root() -> None:
    error = error_from_json({"error": "AcmeError", "message": "no", "details": {"a": 1}})
    assert type(error) is SafelightError
    assert (error.message, error.details) == ("no", {"a": 1})
