"""`safelight bench attention`: how fast each usable attention backend is here, and the ranking that selection uses."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safelight.cli import choices, shapes, values, verification
from safelight.cli.console import Console
from safelight.cli.options import Argument, Command, CommandLine, Option, quoted, wrong_command_line
from safelight.cli.tables import machine_line, milliseconds, printable, table, wrapped
from safelight.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from safelight.attention.backend import AttentionBackend
    from safelight.attention.ranking import Measured, Shape
    from safelight.attention.select import Verdict
    from safelight.attention.timing import Failure
    from safelight.platforms.facts import MachineFacts

    # The calls to time in a dtype, each with the layers that make it.
    ShapesIn = Callable[[str], Mapping[Shape, tuple[str, ...]]]

_HARDWARE = ("platform", "arch", "package", "policy")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found in one shape: the times, the backends that raised, and those that weren't tried."""

    layers: tuple[str, ...]
    measured: "Measured"
    failed: "tuple[Failure, ...]"
    refused: "tuple[Verdict, ...]"

    def to_json(self) -> dict[str, Any]:
        """What was found as plain data."""
        return {
            **self.measured.to_json(),
            "layers": list(self.layers),
            "failed": [failure.to_json() for failure in self.failed],
            "refused": [verdict.to_json() for verdict in self.refused],
        }


def run(line: CommandLine, console: Console) -> None:
    """Time, print a table or JSON, and with `--save` keep the ranking. Everything is checked before anything runs."""
    from safelight.attention.ranking import Ranking, fingerprint, save_ranking, target_file
    from safelight.attention.select import by_name, found_backends
    from safelight.planning import chosen_device, chosen_dtype
    from safelight.platforms import torch_device

    given, problems = line.values, line.problems
    if given["attention"] not in (None, "attention"):
        problems.append(f"bench times attention, found {quoted(given['attention'])}; write safelight bench attention")
    settings = choices.settings_from_environment(problems)
    if given["runs"] is not None and not 1 <= given["runs"] <= 1000:
        problems.append(f"--runs is {given['runs']}; it must be 1 to 1000")
    backends = found_backends()
    named = verification.names_of(given["backend"], by_name(backends), problems)
    model: str | None = given["model"] or (settings.model.value if settings.model else None)
    shapes_in = _shapes(given, model, problems)
    if problems:
        raise wrong_command_line(problems)

    print("safelight: probing this machine and its attention packages", file=console.err, flush=True)
    machine = choices.machine_of(None, given["device"], settings, backends)
    target = target_file(machine) if given["save"] else None
    all_shapes = shapes_in(chosen_dtype(given["dtype"], settings, machine))
    chosen = _chosen(all_shapes, named, machine, by_name(backends))
    device = torch_device(machine, chosen_device(given["device"], settings)[0])
    peaks, found = _time(all_shapes, chosen, by_name(backends), device, given["runs"], console)

    if target is not None:
        measured = tuple(one.measured for one in found if one.measured.timings)
        failed = {one.measured.shape: [failure.backend for failure in one.failed] for one in found}
        save_ranking(target, Ranking(fingerprint=fingerprint(machine), measured=measured), machine, failed)
    if given["json"]:
        document = {
            "machine": machine.to_json(),
            "peaks_flops_per_s": peaks,
            "shapes": [one.to_json() for one in found],
            "saved": None if target is None else str(target),
        }
        console.out.write(json.dumps(document) + "\n")
    else:
        console.out.writelines(f"{text}\n" for text in _lines(machine, peaks, found, named, target))


def _shapes(given: Mapping[str, Any], model: str | None, problems: list[str]) -> "ShapesIn":
    """The shapes that were given, or those of a model's layers."""
    from safelight.planning import shapes_of
    from safelight.request import Request

    if given["shape"]:
        beside = [flag for flag in ("model", "size", "frames") if given[flag] is not None]
        if beside:
            flags = ", ".join(f"--{flag}" for flag in beside)
            problems.append(f"--shape says what to time, and {flags} takes it from a model; give one of them")
        return lambda dtype: {written.shape(dtype): () for written in given["shape"]}
    try:
        width, height = given["size"] or (None, None)
        return shapes_of(model, Request(prompt="-", width=width, height=height, num_frames=given["frames"]))
    except CheckpointError as error:
        problems.append(error.message)
    except RequestError as error:
        problems.extend(choices.by_flag(error))
    return lambda dtype: {}


def _chosen(
    all_shapes: "Iterable[Shape]",
    named: Sequence[str],
    machine: "MachineFacts",
    backends: "Mapping[str, AttentionBackend]",
) -> "dict[Shape, list[Verdict]]":
    """For each shape a verdict on every backend in question: those that were named, else all.

    Raises RequestError for a named one that can't serve a single shape, with its reasons.
    """
    from safelight.attention.select import Verdict, why_not

    chosen = {
        shape: [
            Verdict(
                name, why_not(name, shape.requirements(), machine, backends, is_explicit=name in named, runs_here=True)
            )
            for name in named or sorted(backends)
        ]
        for shape in all_shapes
    }
    problems = []
    for name in named:
        verdicts = [verdict for row in chosen.values() for verdict in row if verdict.backend == name]
        if all(verdict.reasons for verdict in verdicts):
            reasons = dict.fromkeys(reason.detail for verdict in verdicts for reason in verdict.reasons)
            problems.append(f"--backend {name} can't be timed here: {'; '.join(reasons)}")
    if problems:
        raise wrong_command_line(problems)
    return chosen


def _time(
    all_shapes: "Mapping[Shape, tuple[str, ...]]",
    chosen: "Mapping[Shape, Sequence[Verdict]]",
    backends: "Mapping[str, AttentionBackend]",
    device: str,
    num_runs: int | None,
    console: Console,
) -> "tuple[dict[str, float | None], list[Found]]":
    """The peak of each dtype, and the times of each shape."""
    from safelight.attention.ranking import Measured, Timing
    from safelight.attention.timing import Failure, matmul_peak, time_backend

    peaks: dict[str, float | None] = {}
    found = []
    for shape, layers in all_shapes.items():
        if shape.dtype not in peaks:
            print(f"safelight: matrix products in {shape.dtype}", file=console.err, flush=True)
            peaks[shape.dtype] = matmul_peak(shape.dtype, device)
        results = []
        for verdict in chosen[shape]:
            if not verdict.reasons:
                print(f"safelight: {verdict.backend}: {shape}", file=console.err, flush=True)
                results.append(
                    time_backend(
                        backends[verdict.backend],
                        shape,
                        device,
                        num_runs=num_runs,
                        peak_flops_per_s=peaks[shape.dtype],
                    )
                )
        timings = tuple(result for result in results if isinstance(result, Timing))
        found.append(
            Found(
                layers=layers,
                measured=Measured(shape=shape, timings=timings),
                failed=tuple(result for result in results if isinstance(result, Failure)),
                refused=tuple(verdict for verdict in chosen[shape] if verdict.reasons),
            )
        )
    return peaks, found


def _lines(
    machine: "MachineFacts",
    peaks: Mapping[str, float | None],
    found: Sequence[Found],
    named: Sequence[str],
    target: Path | None,
) -> Iterator[str]:
    """What was found, for people: a table for each shape."""
    yield machine_line(machine)
    for dtype, peak in peaks.items():
        yield f"matrix products in {dtype}: {'unknown' if peak is None else f'{peak / 1e12:.3g} TFLOP/s'}"
    for one in found:
        yield ""
        yield from wrapped(
            "", f"{', '.join(one.layers)}: {one.measured.shape}" if one.layers else f"{one.measured.shape}"
        )
        rows = [("backend", "ms", "TFLOP/s", "of the peak", "runs", "against the fastest")]
        for timing in one.measured.timings:
            share = "" if timing.share_of_peak is None else f"{timing.share_of_peak:.1%}"
            against = timing.median_s / one.measured.timings[0].median_s
            rate = f"{timing.flops_per_s / 1e12:.3g}"
            runs = str(timing.num_runs)
            rows.append((timing.backend, milliseconds(timing.median_s), rate, share, runs, f"x {against:.2f}"))
        yield from table(rows) if len(rows) > 1 else ["no backend was timed"]
        for failure in one.failed:
            yield from wrapped(f"{failure.backend} failed: ", failure.cause)
        for verdict in one.refused:
            # What this machine lacks is the doctor's to tell.
            if verdict.backend in named or not any(reason.kind in _HARDWARE for reason in verdict.reasons):
                reasons = "; ".join(reason.detail for reason in verdict.reasons)
                yield from wrapped(f"{verdict.backend} can't: ", reasons)
    if target is not None:
        yield ""
        yield f"saved: {printable(str(target))}"


COMMAND = Command(
    name="bench",
    summary="Time the attention backends that can be used here; --save lets selection use the result.",
    argument=Argument(metavar="attention", help="what to time", example="attention"),
    options=(
        Option(
            flag="--shape",
            metavar="SHAPE",
            convert=shapes.shape,
            repeats=True,
            help=f"a call to time, such as {shapes.EXAMPLE}; can be given several times",
        ),
        choices.MODEL,
        choices.SIZE,
        choices.FRAMES,
        choices.DTYPE,
        choices.DEVICE,
        Option(
            flag="--backend",
            metavar="NAME",
            convert=values.name,
            repeats=True,
            help="time this one alone, also a lossy or a sparse one; can be given several times",
            also=("--attention", "--attention-backend"),
        ),
        Option(
            flag="--runs",
            metavar="N",
            convert=values.whole,
            help="how many runs (default: what fits into a second, 3 to 20)",
            also=("--repeats", "--num-runs", "--iterations"),
        ),
        Option(flag="--save", help="keep the ranking: what nobody chose gets the fastest exact dense backend"),
        Option(flag="--json", help="print JSON"),
    ),
    notes=shapes.NOTES
    + "\nWithout --shape the calls are those of a model's layers, the demo's unless --model names another.",
    run=run,
)
