"""`safelight generate`: a prompt becomes a PNG or an MP4."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safelight.cli import choices, parallel, values
from safelight.cli.console import Console
from safelight.cli.options import Argument, Command, CommandLine, Option, wrong_command_line
from safelight.cli.progress import duration
from safelight.config import Launch
from safelight.errors import CheckpointError, OutputError, RequestError
from safelight.request import Progress, Request, draw_seed

if TYPE_CHECKING:
    from safelight.attention.grid import Grid
    from safelight.attention.plan import AttentionPlan
    from safelight.engine import Engine
    from safelight.pipelines import Checkpoint
    from safelight.planning import Sources


def open_engine(model: str | None, **options: Any) -> "Engine":
    """The engine for a model. Imports torch."""
    from safelight.engine import Engine

    return Engine.from_pretrained(model, **options)


def open_checkpoint(model: str | None) -> "Checkpoint":
    """A model's configurations, without its weights. Imports no torch."""
    from safelight.planning import check_model

    return check_model(model)


def run(
    line: CommandLine,
    console: Console,
    *,
    engine_factory: "Callable[..., Engine]" = open_engine,
    checkpoint_factory: "Callable[[str | None], Checkpoint]" = open_checkpoint,
) -> None:
    """Generate, save, and print what was saved.

    Whatever can be known to be wrong without torch is told first, all of it at once.
    """
    from safelight.attention.lock import changed_facts
    from safelight.media import save_result
    from safelight.planning import preference_sources

    started_s = time.perf_counter()
    given = line.values
    attention = choices.attention_of(given["attention"], line.problems)
    settings = choices.settings_from_environment(line.problems)
    grid = parallel.grid_of(given, line.problems)
    launch = parallel.launch_of(given, grid, settings, line.problems)
    model: str | None = given["model"] or (settings.model.value if settings.model else None)
    request = _request(given, line.problems, console)
    sources = preference_sources(argument=attention, argument_source=choices.FLAG, settings=settings)
    plan_lock = _plan_lock(given["plan"], line.problems)
    rank = parallel.Rank(launch, console)
    with rank.telling():
        request = _checked(request, given, model, sources, grid, launch, line.problems, checkpoint_factory)
    if grid.num_ranks > 1 and launch is None:
        assert request.seed is not None
        parallel.start_ranks(line, grid, console, seed=request.seed, prompt=request.prompt)
        return
    if not rank.is_first and given["seed"] is None:
        request = request.replace(seed=None)  # it takes the first rank's

    device = given["device"] or (settings.device.value if grid.num_ranks > 1 and settings.device else None)
    with (
        rank.telling(),
        rank.progress() as progress,
        rank.mesh(grid, device, given["rank_timeout"]) as (mesh, device),
    ):
        progress(Progress(stage="load", step=0, num_steps=1, elapsed_s=0.0))
        engine = engine_factory(
            model,
            attention=attention or None,
            attention_source=choices.FLAG,
            device=device,
            dtype=given["dtype"],
            check_attention=given["check_attention"],
            settings=settings,
            plan_lock=plan_lock,
            report=progress,
            **({} if mesh is None else {"mesh": mesh}),
        )
        ranks = f", {grid.num_ranks} ranks: {grid}" if grid.num_ranks > 1 else ""
        progress.say(f"{engine.model} on {engine.machine.platform} ({engine.machine.arch}), {engine.dtype}{ranks}")
        for text in engine.plan(request).lines():
            progress.say(text)
        if plan_lock is not None:
            for text in changed_facts(plan_lock.machine, engine.machine):
                progress.say(f"the same kernels as locked, but {text}")
        result = engine.generate(request, report=progress)
        if not rank.is_first:
            return
        for check in result.attention_checks:
            progress.say(f"checked {check}")
        progress(Progress(stage="write", step=0, num_steps=1, elapsed_s=time.perf_counter() - started_s))
        result = save_result(result, given["out"], overwrite=given["overwrite"])

    elapsed = duration(time.perf_counter() - started_s)
    for warning in result.warnings:
        print(f"safelight: warning: {warning}", file=console.err)
    if given["json"]:
        import json

        json.dump(result.to_json(), console.out)
        console.out.write("\n")
    elif len(result.outputs) == 1:
        console.out.write(f"{described(**result.outputs[0].to_json())}, {elapsed}\n")
    else:
        console.out.writelines(f"{described(**output.to_json())}\n" for output in result.outputs)
        print(f"{len(result.outputs)} outputs in {elapsed}", file=console.err)


def described(*, path: str, width: int, height: int, num_frames: int, fps: float, seed: int) -> str:
    """An output's JSON in one line: "circle.mp4  64x64, 9 frames at 8 fps, seed 7"."""
    frames = "1 frame" if num_frames == 1 else f"{num_frames} frames at {fps:g} fps"
    return f"{path}  {width}x{height}, {frames}, seed {seed}"


def _request(given: Mapping[str, Any], problems: list[str], console: Console) -> Request | None:
    """The request, or None and what is wrong with it."""
    prompt: str | None = given["prompt"]
    if prompt == "-":
        prompt = _prompt_from_stdin(problems, console)
    width, height = given["size"] or (None, None)
    seed = given["seed"]
    try:
        return Request(
            # One that is missing is told already; the rest is checked all the same.
            prompt="-" if prompt is None else prompt,
            negative_prompt=given["negative"],
            width=width,
            height=height,
            num_frames=given["frames"],
            fps=given["fps"],
            num_steps=given["steps"],
            guidance_scale=given["guidance"],
            guidance_scale_2=given["guidance_2"],
            # Drawn here and not by the engine, so that the files' names can be checked before anything is loaded.
            seed=draw_seed() if seed is None else seed,
            num_outputs=1 if given["num_outputs"] is None else given["num_outputs"],
            cancel=console.cancel,
        )
    except RequestError as error:
        problems.extend(choices.by_flag(error))
        return None


def _plan_lock(path: Path | None, problems: list[str]) -> "AttentionPlan | None":
    """The locked plan, or None and what is wrong with its file."""
    from safelight.attention.lock import read_lock

    try:
        return None if path is None else read_lock(path)
    except RequestError as error:
        problems.append(error.message)
        return None


def _checked(
    request: Request | None,
    given: Mapping[str, Any],
    model: str | None,
    sources: "Sources",
    grid: "Grid",
    launch: Launch | None,
    problems: list[str],
    checkpoint_factory: "Callable[[str | None], Checkpoint]",
) -> Request:
    """The request with the model's defaults, after every check that needs no torch; raises all that was found."""
    from safelight.attention.plan import check_names
    from safelight.media import check_dimensions
    from safelight.naming import plan_paths
    from safelight.planning import check_parallel

    errors: list[RequestError] = []
    is_here = model is None or os.path.exists(os.path.expanduser(model))
    if is_here or not problems:  # a hub's model isn't downloaded for a command line that is wrong anyway
        try:
            checkpoint = checkpoint_factory(model)
            check_names(checkpoint.layer_groups("float32"), sources)
            if request is not None:
                request = checkpoint.resolve(request)
                if launch is None or launch.num_ranks == grid.num_ranks:  # else what would work is no answer
                    check_parallel(checkpoint, grid, request)
        except CheckpointError as error:
            errors.append(error)
        except RequestError as error:
            problems.extend(choices.by_flag(error))
    if request is not None:
        out: Path | None = given["out"]
        # Where the model's default isn't known, the name that was given tells what is expected.
        num_frames = request.num_frames or (1 if out is not None and out.suffix.lower() == ".png" else 2)
        try:
            if request.width and request.height and request.fps:
                check_dimensions(width=request.width, height=request.height, num_frames=num_frames, fps=request.fps)
            assert request.seed is not None
            plan_paths(
                out,
                prompt=request.prompt,
                seed=request.seed,
                num_outputs=request.num_outputs,
                num_frames=num_frames,
                directory=Path(),
                overwrite=given["overwrite"],
            )
        except OutputError as error:
            errors.append(error)
    if problems or len(errors) > 1:
        raise wrong_command_line([*problems, *(error.message for error in errors)])
    if errors:
        raise errors[0]
    assert request is not None
    return request


def _prompt_from_stdin(problems: list[str], console: Console) -> str | None:
    """The prompt that was piped in: UTF-8, without the line break that ends it."""
    if sys.stdin.isatty():
        print("safelight: reading the prompt from the keyboard; Ctrl-D ends it", file=console.err, flush=True)
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problems.append(f"PROMPT (from standard input) isn't UTF-8 text: byte {error.start} is wrong")
        return None
    return text.removesuffix("\n").removesuffix("\r")


COMMAND = Command(
    name="generate",
    summary="Make an image or a video from a prompt.",
    argument=Argument(
        metavar="PROMPT",
        help='what to show, in quotes; "-" reads it from standard input (UTF-8)',
        example='"a red circle moving right"',
    ),
    options=(
        choices.MODEL,
        Option(
            flag="--negative",
            metavar="TEXT",
            help="what not to show; used when guidance is above 1",
            also=("--negative-prompt", "--n-prompt", "--neg-prompt"),
        ),
        choices.SIZE,
        choices.FRAMES,
        Option(
            flag="--fps",
            metavar="RATE",
            convert=values.fps,
            help="frames per second: 16, 23.976, 24000/1001",
            also=("--frame-rate", "--framerate"),
        ),
        Option(
            flag="--steps",
            metavar="N",
            convert=values.whole,
            help="how many denoising steps",
            also=("--num-steps", "--num-inference-steps", "--sample-steps", "--sampling-steps"),
        ),
        choices.GUIDANCE,
        choices.GUIDANCE_2,
        Option(
            flag="--seed",
            metavar="N",
            convert=values.whole,
            help="0 to 9223372036854775807: the same seed gives the same result (default: a random one, shown)",
        ),
        Option(
            flag="--num-outputs",
            metavar="N",
            convert=values.whole,
            help="how many results; output i has seed + i",
            also=("--batch-size", "--num-images", "--num-videos", "--num-samples", "--n"),
        ),
        Option(
            flag="--out",
            metavar="FILE",
            convert=values.path,
            help="a .png for one frame, else an .mp4; several outputs are numbered (default: named after the prompt)",
            also=("--output", "-o", "--save-path", "--output-path", "--outfile"),
        ),
        Option(flag="--overwrite", help="replace FILE if it exists", also=("--force", "--yes", "-y")),
        choices.ATTENTION,
        Option(
            flag="--plan",
            metavar="FILE",
            convert=values.path,
            help="run only with the kernels that this file has; `safelight explain --lock FILE` writes it",
            also=("--lock", "--plan-lock"),
        ),
        Option(
            flag="--check-attention",
            metavar="WHEN",
            convert=values.check,
            help="hold attention kernels to the float32 reference while they run, and stop where they disagree: "
            "first (in the first call of each kind of layer), always or off (the default)",
        ),
        choices.DEVICE,
        choices.DTYPE,
        parallel.ULYSSES,
        parallel.RING,
        parallel.CFG_PARALLEL,
        parallel.RANK_TIMEOUT,
        Option(flag="--json", help="print the result, or the error, as JSON"),
    ),
    notes="What isn't given is the model's default. The settings are kept in the file: `safelight explain FILE`.",
    run=run,
)
