"""Attention packages: how each is recognised without importing it, and what a subprocess finds out about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A distribution that is installed: its name as found, its version, and the files that it owns."""

    dist: str
    version: str
    files: frozenset[str] = frozenset()


def _no_variant(installed: Installed, env: Mapping[str, str]) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Package:
    """An attention package, as a backend declares it.

    `key` is Safelight's own name for it in MachineFacts.packages, since import names collide. `dists` are the
    distributions that may provide it, the first that is installed counts; one that doesn't own the file `owns` is
    another package of that name. `needs` are top-level modules that must be there too. `module` and `function` are the
    entry point, imported only in a subprocess, which reads its parameters. `variant` tells builds of one version apart
    and is pure. `min_version` is the oldest that serves. `remedy` says how to install it.
    """

    key: str
    dists: tuple[str, ...]
    remedy: str
    owns: str | None = None
    needs: tuple[str, ...] = ()
    module: str | None = None
    function: str | None = None
    min_version: str | None = None
    variant: Callable[[Installed, Mapping[str, str]], str | None] = _no_variant
