"""Every command and program in the README is run: by CI as it stands, or here in an empty folder.

A block that needs what CI lacks says so after its language (```bash needs="a GPU with 24 GB"); then its commands are
read by the program's own reader, and its Python is compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.documents import Block, blocks, parse
from tests.rules.source import ROOT

README = ROOT / "README.md"
BLOCKS = blocks(README)
SHELL = [block for block in BLOCKS if block.language == "bash"]
PYTHON = [block for block in BLOCKS if block.language == "python"]

# Getting the repository is where CI starts from.
BEFORE_CI = ("git clone", "cd")
SCRIPTS = ("scripts/setup", "scripts/demo", "scripts/check", "scripts/test")
PROGRAMS = (".venv/bin/safelight", "safelight", ".venv/bin/torchrun")
# Not code: what a program prints, or data.
SHOWN = ("text", "json", "toml")


def where(block: Block) -> str:
    return f"README.md:{block.line}"


def is_before_ci(command: str) -> bool:
    return any(command == start or command.startswith(f"{start} ") for start in BEFORE_CI)


def test_every_block_says_its_language() -> None:
    assert [where(block) for block in BLOCKS if block.language not in ("bash", "python", *SHOWN)] == []


@pytest.mark.parametrize("block", SHELL, ids=where)
def test_every_command_is_known(block: Block) -> None:
    """A command that nothing here knows would be run by nothing."""
    unknown = [
        command
        for command in block.commands
        if not is_before_ci(command) and parse(command).program not in (*SCRIPTS, *PROGRAMS)
    ]
    assert unknown == []


def test_the_readme_s_first_two_commands_are_what_ci_runs() -> None:
    commands = [c for block in SHELL if not block.needs for c in block.commands if not is_before_ci(c)]
    assert commands[:2] == ["scripts/demo", "scripts/test"]
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    for command in ("scripts/check", "scripts/test"):
        assert lines.count(command) == 1, f"CI runs {command} as the README has it, once"
    assert any('"$here/scripts/demo"' in line for line in lines)
    in_readme = {command for command in commands if parse(command).program in SCRIPTS and not parse(command).variables}
    assert in_readme <= {"scripts/check", "scripts/demo", "scripts/setup", "scripts/test"}, (
        "CI runs them without arguments"
    )


def test_what_cannot_be_run_here_is_well_formed() -> None:
    for command in [command for block in SHELL if block.needs for command in block.commands]:
        assert problems_of(command) == [], command


def problems_of(command: str) -> list[str]:
    """What the program's own reader has against a command."""
    from safelight.cli import main

    words = parse(command)
    if words.program not in PROGRAMS:
        return []
    known = {command.name: command for command in main._commands()}
    name, *rest = words.arguments
    return known[name].read(rest).problems if name in known else [f"no command {name}"]


def test_a_wrong_option_is_seen() -> None:
    assert problems_of('safelight generate "a cat" --size 64x64 --model org/name') == []
    assert "--sise" in problems_of('safelight generate "a cat" --sise 64x64')[0]
    assert problems_of("safelight paint") == ["no command paint"]


def folder_like_a_clone(path: Path) -> dict[str, str]:
    """Make `path` a place where the README's commands can be typed; returns the environment for them."""
    (path / ".venv").symlink_to(sys.prefix)
    return {**os.environ, "PATH": os.pathsep.join([str(path / ".venv/bin"), os.environ["PATH"]])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [b for b in SHELL if not b.needs and any(parse(c).program in PROGRAMS for c in b.commands if not is_before_ci(c))],
    ids=where,
)
def test_shell_block_runs(block: Block, tmp_path: Path) -> None:
    """Each of its commands works, in order, in an empty folder, and a file that a command names is there afterwards."""
    environment = folder_like_a_clone(tmp_path)
    for command in block.commands:
        words = parse(command)
        if words.program not in PROGRAMS:
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        if "--out" in words.arguments:
            out = tmp_path / words.arguments[words.arguments.index("--out") + 1]
            assert out.stat().st_size > 0


@pytest.mark.parametrize("block", PYTHON, ids=where)
def test_python_block_compiles(block: Block) -> None:
    compile(block.code, where(block), "exec")


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in PYTHON if not block.needs], ids=where)
def test_python_block_runs(block: Block, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", block.code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "the block prints something that a reader will want to see"


def test_blocks_are_taken_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    shell = '```bash\n# why\nA="b c" x/y "one two" \\\n  --n 3  # more\ncd z | q\n```\n'
    page.write_text(f'# A\n\n{shell}```bash needs="x y"\nls\n```\n')
    first, second = blocks(page)
    assert (first.language, first.needs, first.line) == ("bash", "", 3)
    assert (second.needs, second.commands) == ("x y", ["ls"])
    command, other = (parse(text) for text in first.commands)
    assert (command.variables, command.program, command.arguments) == (("A=b c",), "x/y", ("one two", "--n", "3"))
    assert (other.program, other.arguments) == ("cd", ("z",))
    page.write_text("```bash run=never\nls\n```\n")
    with pytest.raises(AssertionError, match="run=never"):
        blocks(page)
