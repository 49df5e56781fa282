"""What several commands let a person choose: model, attention, device and dtype, and the settings behind them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from safelight.cli import values
from safelight.cli.options import Option, nearest, quoted
from safelight.config import Settings, parse_attention
from safelight.errors import RequestError

if TYPE_CHECKING:
    from safelight.catalog import Found
    from safelight.platforms.facts import MachineFacts

FLAG = "`--attention` flag"

MODEL = Option(
    flag="--model",
    metavar="PATH_OR_ID",
    convert=values.name,
    help="a model's directory in diffusers' layout, or its id on the hub (default: the demo model)",
    also=("--checkpoint", "--model-path", "--pretrained", "--ckpt"),
)
ATTENTION = Option(
    flag="--attention",
    metavar="NAME",
    repeats=True,
    help="the attention backend: NAME, COMPONENT=NAME or COMPONENT.ROLE=NAME; can be given several times",
    also=("--attention-backend", "--attn", "--backend", "--attn-backend"),
)
DEVICE = Option(flag="--device", metavar="NAME", convert=values.name, help="where to run: cpu, cuda, cuda:1, mps")
DTYPE = Option(
    flag="--dtype",
    metavar="NAME",
    convert=values.dtype,
    help="float32, bfloat16 or float16",
    also=("--torch-dtype", "--precision"),
)
SIZE = Option(
    flag="--size",
    metavar="WIDTHxHEIGHT",
    convert=values.size,
    help="in pixels",
    also=("--width", "--height", "--resolution"),
)
FRAMES = Option(
    flag="--frames",
    metavar="N",
    convert=values.whole,
    help="how many frames; 1 makes an image",
    also=("--num-frames", "--length", "--video-length"),
)
GUIDANCE = Option(
    flag="--guidance",
    metavar="SCALE",
    convert=values.number,
    help="how closely to follow the prompt; 1 or less switches guidance off",
    also=("--guidance-scale", "--cfg", "--cfg-scale", "--scale"),
)
GUIDANCE_2 = Option(
    flag="--guidance-2",
    metavar="SCALE",
    convert=values.number,
    help="--guidance in the low-noise stage of a model with two, such as Wan 2.2 (default: as --guidance)",
    also=("--guidance-scale-2", "--guidance-low", "--cfg-2"),
)
MACHINE = Option(
    flag="--machine",
    metavar="NAME_OR_FILE",
    convert=values.name,
    help="another machine than this: a described one by name, or the one in a file: facts, a plan or a result",
)


# What a field of Request is called on the command line.
_FLAGS = {
    "prompt": "PROMPT",
    "negative_prompt": "--negative",
    "width": "--size: the width",
    "height": "--size: the height",
    "num_frames": "--frames",
    "num_steps": "--steps",
    "guidance_scale": "--guidance",
    "guidance_scale_2": "--guidance-2",
    "seed": "--seed",
    "num_outputs": "--num-outputs",
    "fps": "--fps",
}


def by_flag(error: RequestError) -> list[str]:
    """What is wrong, one by one; of a request's fields, with the options' names in place of theirs."""
    if "fields" not in error.details:
        return [error.message]
    pairs = zip(error.details["fields"], error.details["problems"], strict=True)
    return [_FLAGS.get(field, field) + problem.removeprefix(field) for field, problem in pairs]


def settings_from_environment(problems: list[str]) -> Settings:
    """What is set outside the command line; nothing where it is wrong, which ends up among the problems."""
    try:
        return Settings.from_environment()
    except RequestError as error:
        problems.extend(error.details["problems"])
        return Settings()


def machine_of(
    name: str | None, device: str | None, settings: Settings, backends: "Found", *, imports_all: bool = False
) -> "MachineFacts":
    """A described machine by its name or file; None is this one, on the device that is asked for."""
    from safelight.platforms import load_machine

    if name is not None:
        return load_machine(name)
    from safelight.attention.machine import this_machine
    from safelight.planning import chosen_device

    asked, source = chosen_device(device, settings)
    return this_machine(backends, asked, source=source, imports_all=imports_all)


def attention_of(given: Sequence[str], problems: list[str]) -> dict[str, str]:
    """What `--attention` names, by component and role; "" is everything."""
    if not given:
        return {}
    from safelight.attention.select import AUTO, canonical, declared_backends

    try:
        choices = parse_attention(given, "--attention")
    except RequestError as error:
        problems.extend(f"--attention: {problem}" for problem in error.details["problems"])
        return {}
    backends = declared_backends()
    for choice in choices:
        if choice.backend != AUTO and canonical(choice.backend, backends) not in backends:
            aliases = [alias for backend in backends.values() for alias in backend.aliases]
            near = nearest(choice.backend, [AUTO, *backends, *aliases])
            hint = "" if near is None else f"did you mean {near}? "
            problems.append(
                f"--attention names {quoted(choice.backend)}; no backend has this name. "
                f"{hint}They are {', '.join(sorted({AUTO, *backends}))}"
            )
    return {choice.names: choice.backend for choice in choices}
