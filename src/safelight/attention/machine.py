"""This machine as selection sees it: the platform's facts, the packages of declared backends, and their switches."""

import dataclasses
from collections.abc import Iterable

from safelight.attention.backend import AttentionBackend
from safelight.attention.select import hardware_reasons
from safelight.catalog import Found
from safelight.config import environment_switches
from safelight.platforms import probe_machine
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package, probe_packages


def this_machine(
    found: Found, asked: str | None = None, *, source: str | None = None, imports_all: bool = False
) -> MachineFacts:
    """Probe this machine for the backends of `found_backends`. Imports torch.

    `asked` and `source` are those of `probe_machine`. Every package is recognised by its metadata; the ones that could
    be used here are also imported, each in a subprocess, or with `imports_all` every one. Raises RequestError for a
    device that isn't here.
    """
    machine = probe_machine(asked, source=source)
    backends: tuple[AttentionBackend, ...] = found.declarations
    env = environment_switches(name for backend in backends for name in backend.env)
    failed = [f"the backend plug-in {failure.origin} doesn't load: {failure.cause}" for failure in found.failures]
    return machine.replace(
        packages={**machine.packages, **probe_packages(_packages(backends, machine, imports_all=imports_all), env)},
        env=env,
        notes=(*machine.notes, *failed),
    )


def _packages(backends: Iterable[AttentionBackend], machine: MachineFacts, *, imports_all: bool) -> Iterable[Package]:
    """The backends' packages; without an entry point where importing it could decide nothing."""
    chosen: dict[str, Package] = {}
    for backend in backends:
        package = backend.package
        if package is None:
            continue
        if imports_all or could_run(backend, machine):
            chosen[package.key] = package
        else:
            chosen.setdefault(package.key, dataclasses.replace(package, module=None, function=None))
    return chosen.values()


def could_run(backend: AttentionBackend, machine: MachineFacts) -> bool:
    """Whether the backend has an adapter and code for this machine's hardware, whatever its package is like."""
    is_wrong = any(reason.kind in ("platform", "arch") for reason in hardware_reasons(backend, machine))
    return backend.load is not None and not is_wrong
