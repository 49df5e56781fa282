"""`safelight doctor`: this machine, the settings in use, and what state each attention backend is in."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from safelight.cli import choices
from safelight.cli.console import Console
from safelight.cli.options import Command, CommandLine, Option, wrong_command_line
from safelight.cli.tables import machine_line, printable, table, wrapped
from safelight.config import Settings, found_config_file

if TYPE_CHECKING:
    from safelight.attention.backend import AttentionBackend
    from safelight.catalog import Found
    from safelight.platforms.facts import MachineFacts

State = Literal[
    "usable", "wrong hardware", "not installed", "broken", "too old", "wrong build", "adapter not built yet"
]
_ADAPTER: Literal["adapter not built yet"] = "adapter not built yet"


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
    """The state of one backend. Where the hardware is wrong, nothing else about it matters.

    A package isn't recommended while no adapter here would call it.
    """
    from safelight.attention.requirements import AttentionRequirements
    from safelight.attention.select import hardware_reasons

    # Any layer of a transformer will do: what a declaration says about arch or package is the same for all of them.
    layer = AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=16, num_kv_heads=16, equal_lengths=True)
    lacking = hardware_reasons(backend, machine, runs_here=runs_here)
    build = tuple(r for r in backend.why_not(layer, machine) if r.kind in ("platform", "arch", "package"))
    hardware = tuple(reason for reason in lacking if reason.kind in ("platform", "arch"))
    package = None if backend.package is None else machine.packages.get(backend.package.key)
    is_broken = package is not None and package.import_error is not None
    is_missing = backend.package is not None and package is None
    # In the order in which a person would have to see to them.
    states: tuple[tuple[object, State], ...] = (
        (hardware, "wrong hardware"),
        (is_broken, "broken"),
        (runs_here and backend.load is None, _ADAPTER),
        (is_missing, "not installed"),
        (lacking, "too old"),
        (build, "wrong build"),
    )
    state: State = next((state for applies, state in states if applies), "usable")
    has_remedy = backend.package is not None and state in ("broken", "not installed", "too old")
    return Finding(
        backend=backend.name,
        state=state,
        reasons=tuple(reason.detail for reason in hardware or (*lacking, *build)),
        remedy=backend.package.remedy if has_remedy and backend.package else None,
    )


def run(line: CommandLine, console: Console) -> None:
    """Print the findings, usable backends first."""
    from safelight.attention.select import found_backends

    given, problems = line.values, line.problems
    wrong: list[str] = []  # wrong settings end no diagnosis: they are part of it
    settings = choices.settings_from_environment(wrong)
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
            "wrong_settings": wrong,
            "config_file": None if (file := found_config_file()) is None else str(file),
        }
        console.out.write(json.dumps(document) + "\n")
    else:
        lines = [*_machine_lines(machine, findings, backends), *(_setting_lines(settings, wrong) if is_here else ())]
        console.out.writelines(f"{text}\n" for text in lines)


def _machine_lines(machine: "MachineFacts", findings: Sequence[Finding], backends: "Found") -> Iterator[str]:
    yield machine_line(machine)
    for note in machine.notes:
        yield from wrapped("note: ", note)
    yield ""
    yield from table([("backend", "state", "what to know"), *((f.backend, f.state, _told(f)) for f in findings)])
    for failure in backends.failures:
        yield from wrapped("", f"the plug-in {failure.origin} doesn't load: {failure.cause}")


def _setting_lines(settings: Settings, wrong: Sequence[str]) -> Iterator[str]:
    yield ""
    rows = [("setting", "value", "source"), *_set(settings)]
    yield from table(rows) if len(rows) > 1 else ["nothing is set in the environment or a config file"]
    file = found_config_file()
    if file is not None:
        yield f"config file: {printable(str(file))}{'' if os.path.exists(file) else ' (not there)'}"
    for problem in wrong:
        yield from wrapped("wrong, so no setting is used: ", problem)


def _told(finding: Finding) -> str:
    """What the table says beside a state: never the state again."""
    if finding.state == "not installed":
        return "; ".join([finding.remedy or "", *finding.reasons[1:]])
    remedy = () if finding.remedy is None else (f"remedy: {finding.remedy}",)
    return "; ".join([*(reason for reason in finding.reasons if reason != _ADAPTER), *remedy])


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
