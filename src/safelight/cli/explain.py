"""`safelight explain`: the attention plan of a model on a machine; or with FILE, how a result came about."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safelight.cli import choices, parallel, values
from safelight.cli.console import Console
from safelight.cli.generate import described
from safelight.cli.options import Argument, Command, CommandLine, Option, wrong_command_line
from safelight.cli.sharing import OPTIONS, sharing_in, sharing_lines, too_few
from safelight.cli.tables import machine_line, milliseconds, printable, table, wrapped
from safelight.errors import RequestError

if TYPE_CHECKING:
    from safelight.attention.plan import AttentionPlan, PlannedLayer
    from safelight.attention.ranking import Measured
    from safelight.planning import Sharing


def run(line: CommandLine, console: Console) -> None:
    """Print a plan or a file's metadata: for people, or with `--json` as JSON."""
    if line.values["file"] is None:
        _explain_plan(line, console)
    else:
        _explain_file(line, console)


# A plan


def _explain_plan(line: CommandLine, console: Console) -> None:
    from safelight.attention.lock import lock_text
    from safelight.naming import check_target, write_whole

    given = line.values
    out: Path | None = given["lock"]
    if out is not None:
        check_target(out, overwrite=given["overwrite"])
    plan, sharing = _plan(line)
    if out is not None:
        write_whole(out, lock_text(plan), overwrite=given["overwrite"])
        print(f"safelight: the plan is in {out}", file=console.err)
    if given["json"]:
        import json

        shared = {} if sharing is None else {"sharing": sharing.to_json()}
        json.dump({**plan.to_json(), **shared}, console.out)
        console.out.write("\n")
    else:
        console.out.writelines(f"{text}\n" for text in _plan_lines(plan, sharing))


def _plan(line: CommandLine) -> "tuple[AttentionPlan, Sharing | None]":
    """The plan, and on several ranks how they share a request."""
    from safelight.attention.ranking import SavedRanking, saved_ranking
    from safelight.attention.select import by_name, found_backends
    from safelight.planning import chosen_dtype, plan_model, preference_sources

    given, problems = line.values, line.problems
    attention = choices.attention_of(given["attention"], problems)
    settings = choices.settings_from_environment(problems)
    model: str | None = given["model"] or (settings.model.value if settings.model else None)
    grid = parallel.grid_of(given, problems)
    parallel.check_device(given["device"], settings, grid.num_ranks, problems)
    if given["machine"] is not None and given["device"] is not None:
        problems.append("--device names a device of this machine, and --machine another machine; give one of them")
    if given["overwrite"] and given["lock"] is None:
        problems.append("--overwrite is for --lock FILE; give that too, or leave it out")
    sharing = sharing_in(given, model, grid, problems)
    if problems:
        raise wrong_command_line(problems)
    backends = found_backends()
    machine = choices.machine_of(given["machine"], given["device"], settings, backends)
    # Another machine's times aren't known here.
    measured = saved_ranking(machine) if given["machine"] is None else SavedRanking()
    dtype = chosen_dtype(given["dtype"], settings, machine)
    plan = plan_model(
        model,
        machine.replace(notes=(*machine.notes, *measured.notes, *too_few(grid, machine))),
        by_name(backends),
        sources=preference_sources(argument=attention, argument_source=choices.FLAG, settings=settings),
        dtype=dtype,
        runs_here=given["machine"] is None,
        measured=measured.ranking,
        grid=grid,
    )
    return plan, None if sharing is None else sharing(dtype)


def _plan_lines(plan: "AttentionPlan", sharing: "Sharing | None") -> Iterator[str]:
    """The plan for people: a row for each kind of layer, then what ranks share, then who was refused and why."""
    yield machine_line(plan.machine)
    if plan.grid.num_ranks > 1:
        yield f"each of {plan.grid.num_ranks} ranks: {plan.grid}"
    yield ""
    rows = [("component", "role", "layers", "dtype", "backend", "why")]
    for layer in plan.layers:
        need, selection = layer.requirements, layer.selection
        source = "" if selection.preference is None else selection.preference.source
        why = selection.reason or source
        if selection.reason and source:
            why += f": {selection.preference.backend if selection.preference else ''} ({source}) doesn't fit"
        if selection.measured is not None:
            why += f" ({_times(selection.measured)})"
        rows.append((need.component, need.role, str(layer.count), need.dtype, selection.backend, why))
    yield from table(rows)
    if sharing is not None:
        yield from sharing_lines(sharing, plan.grid)
    for names, layer in _by_refusals(plan.layers):
        if layer.selection.rejected:
            yield ""
            yield from wrapped("", f"refused for {', '.join(names)}")
            width = max(len(verdict.backend) for verdict in layer.selection.rejected)
            for verdict in layer.selection.rejected:
                reasons = "; ".join(f"{reason.kind}: {reason.detail}" for reason in verdict.reasons)
                yield from wrapped(f"  {verdict.backend:<{width}}  ", reasons)
    for note in plan.machine.notes:
        yield from wrapped("note: ", note)


def _times(measured: "Measured") -> str:
    """Measured times in a few words: "flash3 1.2 ms, sdpa 3.4 ms at 4096 tokens"."""
    times = ", ".join(f"{timing.backend} {milliseconds(timing.median_s)} ms" for timing in measured.timings)
    return f"{times} at {measured.shape.tokens} tokens"


def _by_refusals(layers: "Sequence[PlannedLayer]") -> "list[tuple[list[str], PlannedLayer]]":
    """Kinds of layers that refuse the same backends for the same reasons, told once."""
    groups: dict[Any, tuple[list[str], PlannedLayer]] = {}
    for layer in layers:
        name = f"{layer.requirements.component}.{layer.requirements.role}"
        groups.setdefault(layer.selection.rejected, ([], layer))[0].append(name)
    return list(groups.values())


# A file


def _explain_file(line: CommandLine, console: Console) -> None:
    from safelight.media import read_metadata

    given = line.values
    for option in COMMAND.options:
        if option.key != "json" and given[option.key] not in (None, ()) and given[option.key] is not False:
            line.problems.append(f"{option.flag} is for a plan; leave FILE out, or give FILE alone")
    if line.problems:
        raise wrong_command_line(line.problems)
    if (meant := _meant(given["file"])) is not None:
        raise RequestError(f"{given['file']} isn't a PNG or MP4; did you mean {meant}?")
    document = read_metadata(Path(given["file"]))
    if given["json"]:
        import json

        json.dump(document, console.out)
        console.out.write("\n")
        return
    try:
        lines = list(_file_lines(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"{given['file']} was written by safelight {document['safelight']}, whose metadata this version "
            f"doesn't know ({error!r}); explain FILE --json prints it as it is"
        ) from error
    console.out.writelines(f"{printable(text)}\n" for text in lines)


def _file_lines(document: Mapping[str, Any]) -> Iterator[str]:
    from safelight.attention.plan import AttentionPlan

    output, request = document["outputs"][0], {"model": document["model"], **document["request"]}
    plan = AttentionPlan.from_json(document["plan"])
    yield described(**output)
    for name, value in request.items():
        # The output's own line has these already. What is empty or None wasn't used.
        if name not in ("seed", "width", "height", "num_frames", "fps", "num_outputs") and value not in (None, {}, ""):
            shown = ", ".join(f"{key or 'all'}={value[key]}" for key in value) if isinstance(value, dict) else value
            yield f"  {name:<15} {shown}"
    if plan.grid.num_ranks > 1:
        yield f"  {'ranks':<15} {plan.grid.num_ranks}: {plan.grid}"
    yield f"  {'machine':<15} {plan.machine.platform} ({plan.machine.arch}), torch {plan.machine.torch_version}"
    yield f"  {'safelight':<15} {document['safelight']}"
    yield "attention"
    for text in plan.lines():
        yield f"  {text}"
    for warning in document["warnings"]:
        yield f"warning: {warning}"


def _meant(file: str) -> str | None:
    """The option that somebody meant who gives, as a result, what is none."""
    from safelight.planning import published_models
    from safelight.platforms import machine_names
    from safelight.weights.model_index import MODEL_INDEX

    if file.lower().endswith(".json") or (file in machine_names() and not os.path.exists(file)):
        return f"--machine {file}"
    is_name = file in published_models() and not os.path.exists(file)
    return f"--model {file}" if is_name or os.path.exists(os.path.join(file, MODEL_INDEX)) else None


COMMAND = Command(
    name="explain",
    summary="Show which attention kernel each layer gets and why; or how a result came about.",
    argument=Argument(
        metavar="FILE",
        help="a PNG or MP4 that safelight wrote: print its prompt, settings and attention instead",
        example="circle.mp4",
        is_required=False,
    ),
    options=(
        choices.MODEL,
        choices.MACHINE,
        choices.ATTENTION,
        choices.DTYPE,
        choices.DEVICE,
        parallel.ULYSSES,
        parallel.RING,
        parallel.CFG_PARALLEL,
        *OPTIONS,
        Option(
            flag="--lock",
            metavar="OUT",
            convert=values.path,
            help="also write the plan, for `safelight generate --plan OUT`",
        ),
        Option(flag="--overwrite", help="replace OUT if it exists"),
        Option(flag="--json", help="print JSON"),
    ),
    notes="Nothing is loaded. --model also takes the name of a published model: safelight explain --model wan2.1-14b\n"
    "--machine mi300x-rocm7-aiter. On another machine, kernels whose adapters aren't built yet take part too.",
    run=run,
)
