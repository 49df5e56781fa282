"""`safelight explain FILE`: how a result came about, as the file itself tells it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safelight.cli.console import Console
from safelight.cli.generate import described
from safelight.cli.options import Argument, Command, CommandLine, Option, wrong_command_line
from safelight.errors import RequestError


def run(line: CommandLine, console: Console) -> None:
    """Print a file's metadata: for people, or with `--json` the document as it is in the file."""
    from safelight.media import read_metadata

    if line.problems:
        raise wrong_command_line(line.problems)
    document = read_metadata(Path(line.values["file"]))
    if line.values["json"]:
        import json

        json.dump(document, console.out)
        console.out.write("\n")
        return
    try:
        lines = list(_lines(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"{line.values['file']} was written by safelight {document['safelight']}, whose metadata this version "
            f"doesn't know ({error!r}); explain FILE --json prints it as it is"
        ) from error
    console.out.writelines(f"{_printable(text)}\n" for text in lines)


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    from safelight.attention.plan import AttentionPlan

    output, request = document["outputs"][0], {"model": document["model"], **document["request"]}
    plan = AttentionPlan.from_json(document["plan"])
    yield described(**output)
    for name, value in request.items():
        # The output's own line has these already. What is empty or None wasn't used.
        if name not in ("seed", "width", "height", "num_frames", "fps", "num_outputs") and value not in (None, {}, ""):
            shown = ", ".join(f"{key or 'all'}={value[key]}" for key in value) if isinstance(value, dict) else value
            yield f"  {name:<15} {shown}"
    yield f"  {'machine':<15} {plan.machine.platform} ({plan.machine.arch}), torch {plan.machine.torch_version}"
    yield f"  {'safelight':<15} {document['safelight']}"
    yield "attention"
    for text in plan.lines():
        yield f"  {text}"
    for warning in document["warnings"]:
        yield f"warning: {warning}"


def _printable(text: str) -> str:
    """Text from a file, unable to move a terminal's cursor or break a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


COMMAND = Command(
    name="explain",
    summary="Show how a result came about: prompt, seed, settings, model and attention.",
    argument=Argument(metavar="FILE", help="a PNG or MP4 that safelight wrote", example="circle.mp4"),
    options=(Option(flag="--json", help="print the file's metadata as JSON"),),
    notes="The settings shown make this very picture again.",
    run=run,
)
