"""`safelight facts`: this machine as JSON, to attach to a report and to plan for with `--machine`."""

import json

from safelight.cli import choices
from safelight.cli.console import Console
from safelight.cli.options import Command, CommandLine, wrong_command_line


def run(line: CommandLine, console: Console) -> None:
    """Probe everything that could matter to a decision, and print it."""
    from safelight.attention.machine import this_machine
    from safelight.attention.select import found_backends
    from safelight.planning import chosen_device

    settings = choices.settings_from_environment(line.problems)
    if line.problems:
        raise wrong_command_line(line.problems)
    device, source = chosen_device(line.values["device"], settings)
    print("safelight: probing this machine and its attention packages", file=console.err, flush=True)
    machine = this_machine(found_backends(), device, source=source, imports_all=True)
    console.out.write(json.dumps(machine.to_json(), indent=2) + "\n")


COMMAND = Command(
    name="facts",
    summary="Print this machine's facts as JSON: all that a decision about kernels depends on.",
    argument=None,
    options=(choices.DEVICE,),
    notes="safelight facts > machine.json; safelight explain --machine machine.json",
    run=run,
)
