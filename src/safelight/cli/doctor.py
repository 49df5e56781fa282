"""`safelight doctor`: this machine, the settings in use, and what state each attention backend is in."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from safelight.cli import choices, values, verification
from safelight.cli.console import Console
from safelight.cli.options import Command, CommandLine, Option, wrong_command_line
from safelight.cli.progress import progress_on
from safelight.cli.tables import machine_line, printable, table, wrapped
from safelight.config import TEXTS, Settings, found_config_file

if TYPE_CHECKING:
    from safelight.attention.backend import AttentionBackend
    from safelight.attention.verify import Verification
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


def run(line: CommandLine, console: Console) -> int:
    """Print the findings, usable backends first; with `--verify` run those, and return 1 if one failed."""
    from safelight.attention.select import by_name, found_backends

    given, problems = line.values, line.problems
    wrong: list[str] = []  # wrong settings end no diagnosis: they are part of it
    settings = choices.settings_from_environment(wrong)
    if given["machine"] is not None and given["device"] is not None:
        problems.append("--device names a device of this machine, and --machine another machine; give one of them")
    if given["verify"] and given["machine"] is not None:
        problems.append("--verify runs kernels, which it can on this machine alone; leave --machine out")
    for option in (_BACKEND, _DTYPE):
        if given[option.key] and not given["verify"]:
            problems.append(f"{option.flag} is for --verify; give that too, or leave it out")
    backends = found_backends()
    names = verification.names_of(given["backend"], by_name(backends), problems)
    if problems:
        raise wrong_command_line(problems)
    is_here = given["machine"] is None
    if is_here:
        print("safelight: probing this machine and its attention packages", file=console.err, flush=True)
    machine = choices.machine_of(given["machine"], given["device"], settings, backends, imports_all=True)
    findings = [examine(backend, machine, runs_here=is_here) for backend in backends.declarations]
    findings.sort(key=lambda finding: (finding.state == "wrong hardware", finding.state != "usable", finding.backend))
    verified = _verified(names, given, machine, by_name(backends), settings, console) if given["verify"] else None
    if given["json"]:
        document = {
            "machine": machine.to_json(),
            "backends": [finding.to_json() for finding in findings],
            "plug_ins_that_failed": [{"name": f.name, "origin": f.origin, "cause": f.cause} for f in backends.failures],
            "settings": [{"name": name, "value": value, "source": source} for name, value, source in _set(settings)],
            "wrong_settings": wrong,
            "config_file": None if (file := found_config_file()) is None else str(file),
            **({} if verified is None else {"verified": [one.to_json() for one in verified]}),
        }
        console.out.write(json.dumps(document) + "\n")
    elif verified is not None:
        lines = [machine_line(machine), "", *verification.lines(verified, by_name(backends))]
        console.out.writelines(f"{text}\n" for text in lines)
    else:
        lines = [*_machine_lines(machine, findings, backends), *(_setting_lines(settings, wrong) if is_here else ())]
        console.out.writelines(f"{text}\n" for text in lines)
    return 0 if all(one.has_passed for one in verified or () if one.num_cases) else 1


def _verified(
    names: Sequence[str],
    given: Mapping[str, Any],
    machine: "MachineFacts",
    backends: "Mapping[str, AttentionBackend]",
    settings: Settings,
    console: Console,
) -> "tuple[Verification, ...]":
    """Hold the chosen backends to their contract on the device."""
    from safelight.planning import chosen_device
    from safelight.platforms import torch_device

    found = {name: examine(backend, machine, runs_here=True) for name, backend in backends.items()}
    asked = verification.chosen(names, given["dtype"], found, backends)
    device = torch_device(machine, chosen_device(given["device"], settings)[0])
    with progress_on(console.err) as progress:
        return verification.verify_all(asked, given["dtype"], machine, backends, device, progress)


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
    if len(rows) > 1:
        yield from table(rows)
    elif not wrong:
        yield "nothing is set in the environment or a config file"
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
    for name in TEXTS:
        setting = getattr(settings, name)
        if setting is not None:
            yield name, setting.value, setting.source
    for source in settings.attention:
        for choice in source:
            yield f"attention {choice.names}".strip(), choice.backend, choice.source


_BACKEND = Option(
    flag="--backend",
    metavar="NAME",
    repeats=True,
    help="with --verify: this backend alone; can be given several times",
    also=("--attention", "--attention-backend"),
)
_DTYPE = Option(
    flag="--dtype",
    metavar="NAME",
    convert=values.dtype,
    repeats=True,
    help="with --verify: in this dtype alone; can be given several times (default: float32 and bfloat16)",
    also=choices.DTYPE.also,
)

COMMAND = Command(
    name="doctor",
    summary="Show this machine, the settings in use, and what state each attention backend is in.",
    argument=None,
    options=(
        choices.MACHINE,
        choices.DEVICE,
        Option(
            flag="--verify",
            help="run every backend that is usable here on the cases of its contract, and compare with the float32 "
            "reference; exit status 1 if one fails",
            also=("--check", "--test", "--self-test"),
        ),
        _BACKEND,
        _DTYPE,
        Option(flag="--json", help="print JSON"),
    ),
    notes="`safelight facts` prints the machine for a report; `safelight explain` says what a model would run with.",
    run=run,
)
