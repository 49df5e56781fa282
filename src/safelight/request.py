"""What crosses the engine's border: Request in, Progress on the way, Result out. All of it survives JSON."""

import dataclasses
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safelight.errors import Cancelled, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from safelight.attention.plan import AttentionPlan

SEED_LIMIT = 2**63
FPS = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{1,40}|/[0-9]{1,40})?")


class CancelToken:
    """Set from any thread to stop a request at its next step."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Ask the request to stop."""
        self._event.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether someone asked."""
        return self._event.is_set()

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled if someone asked."""
        if self._event.is_set():
            raise Cancelled("the request was cancelled")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation request. None means the model's default; 0 is 0.

    `guidance_scale` of 1 or less runs one branch, and the negative prompt has no effect. Output i of `num_outputs` has
    seed (seed + i) mod 2**63; no seed means a random one, which the result records. `fps` is a rational number of
    frames per second. `attention` names backends: {"transformer.self": "sdpa"}; the key "" means everything. Raises
    RequestError with everything that is wrong.
    """

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: Fraction | None = None
    num_steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    num_outputs: int = 1
    attention: Mapping[str, str] = field(default_factory=dict)
    cancel: CancelToken | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise RequestError("; ".join(problems), fields=[problem.split(" ", 1)[0] for problem in problems])

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The request as plain data, without its cancel token; `fps` as a string such as "16" or "24000/1001"."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "cancel"}
        data["fps"] = None if self.fps is None else str(self.fps)
        data["attention"] = dict(self.attention)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """A request from JSON, where null is the same as a field left out; an unknown field is refused."""
        if not isinstance(data, Mapping):
            raise RequestError(f"a request is a JSON object, not {data!r}")
        names = {f.name for f in dataclasses.fields(cls)} - {"cancel"}
        unknown = sorted(set(data) - names)
        if unknown:
            raise RequestError(f"unknown request fields {unknown}; the fields are {sorted(names)}", fields=unknown)
        given = {name: value for name, value in data.items() if value is not None}
        if "prompt" not in given:
            raise RequestError("prompt is missing; say what to generate", fields=["prompt"])
        if "fps" in given:
            given["fps"] = parse_fps(given["fps"])
        return cls(**given)


def _problems(request: Request) -> list[str]:
    """Everything wrong with a request that can be said without a model."""
    problems: list[str] = []

    def whole(name: str, low: int, high: int | None = None) -> None:
        value = getattr(request, name)
        if value is None and name != "num_outputs":
            return
        limits = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        if type(value) is not int or value < low or (high is not None and value > high):
            problems.append(f"{name} is {value!r}; it must be {limits}")

    if not isinstance(request.prompt, str):
        problems.append(f"prompt is {request.prompt!r}; it must be text")
    elif not request.prompt.strip():
        problems.append("prompt is empty; say what to generate")
    if request.negative_prompt is not None and not isinstance(request.negative_prompt, str):
        problems.append(f"negative_prompt is {request.negative_prompt!r}; it must be text")
    whole("width", 1)
    whole("height", 1)
    whole("num_frames", 1)
    whole("num_steps", 1, 10_000)
    whole("num_outputs", 1)
    whole("seed", 0, SEED_LIMIT - 1)
    guidance = request.guidance_scale
    if guidance is not None and (type(guidance) not in (int, float) or not 0 <= guidance <= 1000):
        problems.append(f"guidance_scale is {guidance!r}; it must be a number from 0 to 1000")
    fps = request.fps
    if fps is not None and not (isinstance(fps, Fraction) and 0 < fps <= 1000):
        shown = str(fps) if isinstance(fps, Fraction) else repr(fps)
        problems.append(f"fps is {shown}; it must be a Fraction above 0 and at most 1000")
    named = request.attention
    if not isinstance(named, Mapping) or not all(isinstance(part, str) for pair in named.items() for part in pair):
        problems.append(f'attention is {named!r}; it must map names to backends, as in {{"transformer.self": "sdpa"}}')
    return problems


def parse_fps(text: str | int | float) -> Fraction:
    """A frame rate from "16", "23.976" or "24000/1001"; the rational is kept as given."""
    written = str(text).strip()
    try:
        # Exponents could ask for more digits than there is memory.
        fps = Fraction(written) if FPS.fullmatch(written) else None
    except ZeroDivisionError:
        fps = None
    if fps is None:
        raise RequestError(f"fps is {text!r}; give a number such as 16, 23.976 or 24000/1001", fields=["fps"])
    if not 0 < fps <= 1000:
        raise RequestError(f"fps is {text}; it must be above 0 and at most 1000", fields=["fps"])
    return fps


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a request is. `stage` is "load", "encode", "denoise", "decode" or "write"; times are in seconds.

    `step` of `num_steps` are done in this stage; `remaining_s` is the stage's estimate, None while unknown.
    """

    stage: str
    step: int
    num_steps: int
    elapsed_s: float
    remaining_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The progress as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Output:
    """One generated clip. `frames` is uint8 [frames, height, width, 3]; `path` is None until it is saved."""

    frames: "NDArray[np.uint8]" = field(repr=False, compare=False)
    seed: int
    fps: Fraction
    path: Path | None = None

    @property
    def num_frames(self) -> int:
        """How many frames; one is a still."""
        return int(self.frames.shape[0])

    @property
    def height(self) -> int:
        """Pixels from top to bottom."""
        return int(self.frames.shape[1])

    @property
    def width(self) -> int:
        """Pixels from left to right."""
        return int(self.frames.shape[2])

    def to_json(self) -> dict[str, Any]:
        """Everything but the pixels."""
        return {
            "path": None if self.path is None else str(self.path),
            "seed": self.seed,
            "width": self.width,
            "height": self.height,
            "num_frames": self.num_frames,
            "fps": float(self.fps),
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a request gave: outputs, the attention plan that ran, the resolved request, timings and warnings.

    `request` has no None left but a negative prompt that wasn't used. `timings_s` maps a stage to seconds.
    """

    outputs: tuple[Output, ...]
    plan: "AttentionPlan"
    request: Request
    model: str
    timings_s: Mapping[str, float]
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The public JSON of `generate --json`."""
        return {
            "outputs": [output.to_json() for output in self.outputs],
            "plan": self.plan.to_json(),
            "request": {"model": self.model, **self.request.to_json()},
            "timings_s": dict(self.timings_s),
            "warnings": list(self.warnings),
        }

    def save(self, path: str | Path, *, overwrite: bool = False) -> "Result":
        """Write every output, and return the result with their paths.

        One frame is a PNG, more an MP4; several outputs are numbered name-0, name-1, ... An existing file is refused
        unless `overwrite`. Nothing is left half-written. Raises OutputError and WriteError.
        """
        from safelight.media import save_result

        return save_result(self, Path(path), overwrite=overwrite)
