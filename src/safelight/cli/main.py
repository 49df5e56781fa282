"""The `safelight` program: finds the command, and turns its errors into messages and an exit status."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from safelight.cli.interrupt import Interrupts

if TYPE_CHECKING:
    from safelight.cli.console import Console
    from safelight.cli.options import Command
    from safelight.errors import SafelightError

_NOTES = """\
Results go to standard output; progress, logs and errors to standard error.
Exit status: 0 done, 2 the request or the command line is wrong, 1 anything else, 130 interrupted (143 terminated).
`safelight COMMAND --help` says what a command accepts.
"""


def main(argv: list[str] | None = None, *, commands: "Sequence[Command] | None" = None, says_why: bool = True) -> int:
    """Run the program and return its exit status.

    `argv` are the arguments after the program's name. None takes the process's own, and then the process is the
    program's own too: what is printed after the result still can't reach standard output. `commands` defaults to all.
    Without `says_why`, a signal that stops the program isn't named on standard error.
    """
    if argv is None:
        _fill_closed_streams()
    status = 1
    with Interrupts(says_why=says_why) as interrupts:
        status = _run(argv, commands, interrupts)
    if interrupts.signum is not None:
        interrupts.announce()
        return 128 + interrupts.signum
    return status


def _fill_closed_streams() -> None:
    """Open the standard streams that the caller had closed, lest another file gets their number."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is fd
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def _run(argv: list[str] | None, commands: "Sequence[Command] | None", interrupts: Interrupts) -> int:
    # Imported here, where a Ctrl-C is already dealt with.
    from safelight.cli.console import open_console
    from safelight.errors import SafelightError
    from safelight.request import CancelToken

    cancel = CancelToken()
    interrupts.notify(cancel.cancel)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with open_console(cancel, owns_process=argv is None) as console:
            try:
                return _dispatch(arguments, _commands() if commands is None else commands, console)
            except SafelightError as error:
                _report(error, "--json" in arguments, console)
                return error.exit_status
    except BrokenPipeError:  # whoever read our output has gone, and wants no message either
        return 1


def _commands() -> "Sequence[Command]":
    from safelight.cli import bench, doctor, explain, facts, generate

    return (generate.COMMAND, explain.COMMAND, doctor.COMMAND, facts.COMMAND, bench.COMMAND)


def _dispatch(arguments: Sequence[str], commands: "Sequence[Command]", console: "Console") -> int:
    from safelight.cli.options import nearest, quoted, wrong_command_line

    if not arguments:
        console.err.write(_overview(commands))
        return 2
    name, rest = arguments[0], arguments[1:]
    if name in ("-h", "--help"):
        console.out.write(_overview(commands))
        return 0
    if name == "--version":
        from safelight import __version__

        console.out.write(f"safelight {__version__}\n")
        return 0
    command = next((command for command in commands if command.name == name), None)
    if command is None:
        names = [command.name for command in commands]
        is_option = name.startswith("-")
        near = nearest(name, ["--help", "--version"] if is_option else names)
        if near is not None:
            remedy = f"did you mean {near}?"
        elif is_option:
            remedy = "the command comes first, then its options: safelight generate PROMPT --seed 7"
        else:
            remedy = f"the commands are {', '.join(names)} (a prompt follows its command: safelight generate PROMPT)"
        raise wrong_command_line([f"unknown {'option' if is_option else 'command'} {quoted(name)}; {remedy}"])
    if {"-h", "--help"} & set(rest[: rest.index("--")] if "--" in rest else rest):
        console.out.write(command.help())
        return 0
    return command.run(command.read(rest), console) or 0


def _overview(commands: "Sequence[Command]") -> str:
    lines = "".join(f"  {command.name:<10}{command.summary}\n" for command in commands)
    return f"usage: safelight COMMAND ...\n       safelight --version\n\ncommands:\n{lines}\n{_NOTES}"


def _report(error: "SafelightError", as_json: bool, console: "Console") -> None:
    print(f"safelight: error: {error.message}", file=console.err, flush=True)
    if as_json:
        import json

        json.dump({"error": error.to_json()}, console.out, default=str)
        console.out.write("\n")
