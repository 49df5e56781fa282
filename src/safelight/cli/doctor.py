"""`safelight doctor`: this machine, the settings in use, and what state each attention backend is in."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from safelight.cli import choices
from safelight.cli.console import Console
from safelight.cli.options import Command, CommandLine, Option, wrong_command_line
from safelight.cli.tables import machine_line, table
from safelight.config import Settings

if TYPE_CHECKING:
    from safelight.attention.backend import AttentionBackend
    from safelight.catalog import Found
    from safelight.platforms.facts import MachineFacts

State = Literal["usable", "wrong hardware", "not installed", "broken", "too old", "adapter not built yet"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What state a backend is in on a machine, every reason for it, and what would help."""

    backend: str
    state: State
    reasons: tuple[str, ...]
    remedy: str | None

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {
            "backend": self.backend,
            "state": self.state,
            "reasons": list(self.reasons),
            "remedy": self.remedy,
        }


def examine(backend: "AttentionBackend", machine: "MachineFacts", *, runs_here: bool) -> Finding:
    """The state of one backend. Where the hardware is wrong, nothing else about it matters."""
    from safelight.attention.select import hardware_reasons

    reasons = hardware_reasons(backend, machine, runs_here=runs_here)
    hardware = tuple(reason for reason in reasons if reason.kind in ("platform", "arch"))
    package = None if backend.package is None else machine.packages.get(backend.package.key)
    state: State = "usable"
    remedy = None
    if hardware:
        state, reasons = "wrong hardware", hardware
    elif backend.package is not None and package is None:
        state, remedy = "not installed", backend.package.remedy
    elif package is not None and package.import_error is not None:
        state, remedy = "broken", backend.package.remedy if backend.package else None
    elif runs_here and backend.load is None:
        state = "adapter not built yet"
    elif reasons:
        state, remedy = "too old", backend.package.remedy if backend.package else None
    return Finding(backend=backend.name, state=state, reasons=tuple(reason.detail for reason in reasons), remedy=remedy)


def run(line: CommandLine, console: Console) -> None:
    """Print the findings, usable backends first."""
    from safelight.attention.select import found_backends

    given, problems = line.values, line.problems
    settings = choices.settings_from_environment(problems)
    if given["machine"] is not None and given["device"] is not None:
        problems.append("--device names a device of this machine, and --machine another machine; give one of them")
    if problems:
        raise wrong_command_line(problems)
    is_here = given["machine"] is None
    backends = found_backends()
    if is_here:
        print("safelight: probing this machine and its attention packages", file=console.err, flush=True)
    machine = choices.machine_of(given["machine"], given["device"], settings, backends, imports_all=True)
    findings = [examine(backend, machine, runs_here=is_here) for backend in backends.declarations]
    findings.sort(key=lambda finding: (finding.state == "wrong hardware", finding.state != "usable", finding.backend))
    if given["json"]:
        document = {
            "machine": machine.to_json(),
            "backends": [finding.to_json() for finding in findings],
            "plug_ins_that_failed": [{"name": f.name, "origin": f.origin, "cause": f.cause} for f in backends.failures],
            "settings": [{"name": name, "value": value, "source": source} for name, value, source in _set(settings)],
        }
        console.out.write(json.dumps(document) + "\n")
    else:
        console.out.writelines(f"{text}\n" for text in _lines(machine, findings, backends, settings, is_here=is_here))


def _lines(
    machine: "MachineFacts", findings: Sequence[Finding], backends: "Found", settings: Settings, *, is_here: bool
) -> Iterator[str]:
    yield machine_line(machine)
    for note in machine.notes:
        yield f"note: {note}"
    yield ""
    rows = [("backend", "state", "what to know")]
    for finding in findings:
        told = finding.reasons if finding.state != "not installed" else (finding.remedy or "",)
        rows.append((finding.backend, finding.state, "; ".join(told)))
    yield from table(rows)
    if is_here:
        yield ""
        rows = [("setting", "value", "source"), *_set(settings)]
        yield from table(rows) if len(rows) > 1 else ["nothing is set in the environment or a config file"]
    for failure in backends.failures:
        yield f"the plug-in {failure.origin} doesn't load: {failure.cause}"


def _set(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Every setting: its name, value and source."""
    for name in ("model", "device", "dtype"):
        setting = getattr(settings, name)
        if setting is not None:
            yield name, setting.value, setting.source
    for source in settings.attention:
        for choice in source:
            yield f"attention {choice.names}".strip(), choice.backend, choice.source


COMMAND = Command(
    name="doctor",
    summary="Show this machine, the settings in use, and what state each attention backend is in.",
    argument=None,
    options=(choices.MACHINE, choices.DEVICE, Option(flag="--json", help="print JSON")),
    notes="`safelight facts` prints the machine for a report; `safelight explain` says what a model would run with.",
    run=run,
)
