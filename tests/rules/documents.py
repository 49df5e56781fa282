"""The commands of a document as data: its fenced blocks, and each block's lines."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r'needs="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block. `needs` says what a machine must have to run it, beyond what every machine has: empty as a rule.

    It stands after the language: ```bash needs="a GPU with 24 GB".
    """

    language: str
    needs: str
    code: str
    line: int

    @property
    def commands(self) -> list[str]:
        """A shell block's commands, one a line, with continued lines joined and without comments."""
        joined = self.code.replace("\\\n", " ")
        found = [" ".join(line.split()) for line in joined.splitlines()]
        return [line for line in found if line and not line.startswith("#")]


@dataclass(frozen=True)
class Command:
    """A shell command: the variables set for it, its program and its arguments."""

    variables: tuple[str, ...]
    program: str
    arguments: tuple[str, ...]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        needs = NEEDS.fullmatch(rest.strip())
        assert needs or not rest.strip(), f"{path.name}: what is {rest!r} after ```{language}?"
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(language, needs[1] if needs else "", match["code"], line))
    return found


def parse(command: str) -> Command:
    """Take a line apart as a shell would, up to the first operator."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    end = next((i for i, word in enumerate(words) if set(word) <= set("();<>|&") and word), len(words))
    words = words[:end]
    start = next((i for i, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", word)), len(words))
    assert start < len(words), f"{command!r} runs nothing"
    return Command(tuple(words[:start]), words[start], tuple(words[start + 1 :]))
