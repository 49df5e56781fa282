"""Find the declarations of a package: one constant in each of its modules, then what installed packages add.

Nothing is remembered between calls: who needs the list twice keeps it.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

# What a package built for another machine raises while it is imported or asked a question: anything, errors of its own
# included. This is the one place where Exception is caught to carry on, since nobody may have asked for the package.
BROKEN: tuple[type[BaseException], ...] = (Exception, SystemExit)
# Running out of memory says nothing about a package.
NOT_BROKEN: tuple[type[BaseException], ...] = (MemoryError,)


@dataclass(frozen=True)
class LoadFailure:
    """An entry point that gave no declaration: its name, the first line of the cause, and where it came from."""

    name: str
    cause: str
    origin: str


class Found(NamedTuple):
    """The declarations, built-in ones first, and the entry points that failed."""

    declarations: tuple[Any, ...]
    failures: tuple[LoadFailure, ...]


def cause_of(error: BaseException) -> str:
    """The kind of an error and the first line of its text: "OSError: libcuda.so.1: cannot open shared object file"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def built_in(package: str, constant: str, *, besides: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """The declarations that a package's own modules hold, in the modules' order by name.

    A module holds one unless its name starts with "_" or stands in `besides`.
    """
    return tuple(declaration for declaration, _ in _from_modules(package, constant, besides))


def _own_name(declaration: Any) -> tuple[str, ...]:
    return (declaration.name,)


def declarations(
    package: str,
    constant: str,
    group: str,
    *,
    besides: tuple[str, ...] = (),
    names: Callable[[Any], tuple[str, ...]] = _own_name,
) -> Found:
    """Everything declared: `built_in`, then the entry points of `group`, by name.

    An entry point names the declaration itself ("acme_kernels.safelight:BACKEND"). One that can't be loaded, isn't of
    the built-in declarations' class, or claims one of the `names` that an earlier one has, is a LoadFailure: what is
    installed never ends a run that didn't ask for it.
    """
    found: list[Any] = []
    owners: dict[str, str] = {}
    for declaration, origin in _from_modules(package, constant, besides):
        for name in names(declaration):
            assert name not in owners, f"{constant} {name} is declared by {owners[name]} and by {origin}"
            owners[name] = origin
        found.append(declaration)
    classes = tuple({type(declaration) for declaration in found})
    assert classes, f"no module of {package} holds a {constant}"
    failures = []
    for name, origin, result in _from_entry_points(group):
        if isinstance(result, _Failed):
            failures.append(LoadFailure(name, result.cause, origin))
        elif not isinstance(result, classes):
            allowed = " or ".join(sorted(kind.__name__ for kind in classes))
            failures.append(LoadFailure(name, f"it is of class {type(result).__name__}, not {allowed}", origin))
        elif taken := [claimed for claimed in names(result) if claimed in owners]:
            whose = " and ".join(f"{claimed!r}, which is that of {owners[claimed]}" for claimed in taken)
            failures.append(LoadFailure(name, f"it claims the name {whose}", origin))
        else:
            owners.update(dict.fromkeys(names(result), f"the entry point {origin}"))
            found.append(result)
    return Found(tuple(found), tuple(failures))


def _from_modules(package: str, constant: str, besides: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    path = importlib.import_module(package).__path__
    for name in sorted(module.name for module in pkgutil.iter_modules(path)):
        if name.startswith("_") or name in besides:
            continue
        module = importlib.import_module(f"{package}.{name}")
        assert hasattr(module, constant), f"{module.__name__} holds no {constant}"
        yield getattr(module, constant), module.__name__


@dataclass(frozen=True)
class _Failed:
    cause: str


def _from_entry_points(group: str) -> Iterator[tuple[str, str, Any]]:
    # Imported here because it costs more than the rest of this file, and most commands never come by.
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        dist = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
        origin = f"{point.name} = {point.value}{dist}"
        try:
            yield point.name, origin, point.load()
        except NOT_BROKEN:
            raise
        except BROKEN as error:
            yield point.name, origin, _Failed(cause_of(error))
