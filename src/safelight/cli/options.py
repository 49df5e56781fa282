"""What a command accepts, and reading a command line so that all its problems are told at once."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safelight.errors import RequestError

if TYPE_CHECKING:
    from safelight.cli.console import Console


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command; without a metavar it is a switch.

    `convert` turns the text into a value, and raises ValueError with what is allowed. `repeats` gives a tuple of
    values; any other option may be given once. `also` are names that other programs have for it: they are not
    accepted, but lead to it.
    """

    flag: str
    help: str
    metavar: str | None = None
    convert: Callable[[str], Any] = str
    repeats: bool = False
    also: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The option's name among the values."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Argument:
    """The one thing that a command is given without an option's name."""

    metavar: str
    help: str
    example: str
    is_required: bool = True

    @property
    def key(self) -> str:
        """The argument's name among the values."""
        return self.metavar.lower()


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line that was read: a value for every option, None or () where it wasn't given, and what is wrong.

    `arguments` is the command line as it was given, with the command's name.
    """

    values: dict[str, Any]
    problems: list[str]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: what it accepts and what runs it.

    `run` returns when all is done, and raises otherwise; what was done may be a finding with an exit status of its own,
    which it returns.

    `argument` None means that it takes options alone.
    """

    name: str
    summary: str
    argument: Argument | None
    options: tuple[Option, ...]
    notes: str
    run: "Callable[[CommandLine, Console], int | None]"

    def help(self) -> str:
        """The text of `--help`."""
        return self._parser().format_help()

    def read(self, arguments: Sequence[str]) -> CommandLine:
        """Read the arguments after the command's name. Problems with single values are collected, not raised.

        Raises RequestError where nothing more can be read.
        """
        try:
            found, extras = self._parser().parse_known_args(list(arguments))
        except argparse.ArgumentError as error:
            raise RequestError(self._what_is_wrong(error)) from None
        given: dict[str, Any] = vars(found)
        argument = None if self.argument is None else given[self.argument.key]
        problems = self._surplus(argument, extras)
        values: dict[str, Any] = {option.key: _value(option, given[option.key], problems) for option in self.options}
        if self.argument is not None:
            values[self.argument.key] = argument
            if argument is None and self.argument.is_required and not problems:
                example = f"safelight {self.name} {self.argument.example}"
                problems.append(f"{self.argument.metavar} is missing; for example: {example}")
        return CommandLine(values=values, problems=problems, arguments=(self.name, *arguments))

    def _parser(self) -> argparse.ArgumentParser:
        word = "" if self.argument is None else self.argument.metavar
        if self.argument is not None and not self.argument.is_required:
            word = f"[{word}]"
        parser = argparse.ArgumentParser(
            prog=f"safelight {self.name}",
            description=self.summary,
            epilog=self.notes,
            usage=" ".join(filter(None, ("safelight", self.name, word, "[options]"))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            exit_on_error=False,
            add_help=False,
        )
        if self.argument is not None:
            parser.add_argument(self.argument.key, metavar=self.argument.metavar, help=self.argument.help, nargs="?")
        for option in self.options:
            if option.metavar is None:
                parser.add_argument(option.flag, dest=option.key, help=option.help, action="store_true")
            else:
                # Appended, so that a second value is seen instead of replacing the first.
                parser.add_argument(
                    option.flag, dest=option.key, help=option.help, action="append", metavar=option.metavar
                )
        parser.add_argument("-h", "--help", help="show this and exit", action="store_true")
        return parser

    def _what_is_wrong(self, error: argparse.ArgumentError) -> str:
        option = next(option for option in self.options if option.flag == error.argument_name)
        if option.metavar is None:
            return f"{option.flag} takes no value; write {option.flag} alone"
        return (
            f"{option.flag} needs a value: {option.flag} {option.metavar} "
            f"(one that begins with a dash is written {option.flag}=VALUE)"
        )

    def _surplus(self, argument: str | None, extras: Sequence[str]) -> list[str]:
        """Problems with what no option and no argument took."""
        unknown = [text.partition("=")[0] for text in extras if text.startswith("-") and text != "--"]
        if unknown:
            # Without knowing whether it takes a value, nothing can be said about the words around it.
            return [self._unknown_option(name) for name in unknown]
        words = [text for text in extras if text != "--"]
        if words and self.argument is None:
            return [f"{self.name} takes options alone, found {quoted(' '.join(words))}"]
        if words:
            assert self.argument is not None
            whole = " ".join([argument or "", *words])
            return [f"{self.argument.metavar} is one argument, found {len(words) + 1}; put it in quotes: {whole!r}"]
        return []

    def _unknown_option(self, name: str) -> str:
        flags = {spelling: option.flag for option in self.options for spelling in (option.flag, *option.also)}
        near = nearest(name.lower().replace("_", "-"), [*flags, "--help"])
        if near is None:
            return f"unknown option {name}; `safelight {self.name} --help` lists the options"
        option = next((option for option in self.options if option.flag == flags.get(near)), None)
        return f"unknown option {name}; did you mean {near if option is None else shown(option)}?"


def shown(option: Option) -> str:
    """An option as it is written, with its value's name."""
    return option.flag if option.metavar is None else f"{option.flag} {option.metavar}"


def nearest(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate most like `word`, leading dashes aside; None if none is alike."""
    import difflib  # only a mistake needs it

    bare = {candidate.lstrip("-"): candidate for candidate in candidates}
    found = difflib.get_close_matches(word.lstrip("-"), list(bare), n=1)
    return bare[found[0]] if found else None


def quoted(text: str) -> str:
    """A person's text as it can stand in a message: quoted, and cut if it is long."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def wrong_command_line(problems: Sequence[str]) -> RequestError:
    """One error for everything that is wrong with a command line."""
    if len(problems) == 1:
        return RequestError(problems[0], problems=list(problems))
    listed = "".join(f"\n  {problem}" for problem in problems)
    return RequestError(f"{len(problems)} problems:{listed}", problems=list(problems))


def _value(option: Option, given: Any, problems: list[str]) -> Any:
    """An option's value from what was given for it."""
    if option.metavar is None:
        return given
    texts: list[str] = given or []
    if len(texts) > 1 and not option.repeats:
        problems.append(f"{option.flag} is given {len(texts)} times: {', '.join(map(quoted, texts))}; give it once")
        return None
    values = []
    for text in texts:
        try:
            values.append(option.convert(text))
        except ValueError as error:
            problems.append(f"{option.flag} is {quoted(text)}; {error}")
    if option.repeats:
        return tuple(values)
    return values[0] if values else None
