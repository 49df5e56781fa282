"""What crosses the engine's border: Request in, Progress on the way, Result out. All of it survives JSON."""

import dataclasses
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safelight.errors import Cancelled, OutputError, RequestError

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
        if self.is_cancelled:
            raise Cancelled("the request was cancelled")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation request. None means the model's default; 0 is 0.

    `guidance_scale` of 1 or less runs one branch, and the negative prompt has no effect; `guidance_scale_2` is that of
    the low-noise stage of a model with two, by default the same. Output i of `num_outputs` has seed (seed + i) mod
    2**63; no seed means a random one, which the result records. `fps` is a rational number of frames per second.
    `attention` names backends: {"transformer.self": "sdpa"}; the key "" means everything. Raises RequestError with
    everything that is wrong.
    """

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: Fraction | None = None
    num_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    seed: int | None = None
    num_outputs: int = 1
    attention: Mapping[str, str] = field(default_factory=dict)
    cancel: CancelToken | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise request_error(problems)

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
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            problems.append(f"{name} holds half of a character (a lone surrogate); it must be valid Unicode text")
    whole("width", 1)
    whole("height", 1)
    whole("num_frames", 1)
    whole("num_steps", 1, 10_000)
    whole("num_outputs", 1, 1000)
    whole("seed", 0, SEED_LIMIT - 1)
    for name in ("guidance_scale", "guidance_scale_2"):
        guidance = getattr(request, name)
        if guidance is not None and (type(guidance) not in (int, float) or not 0 <= guidance <= 1000):
            problems.append(f"{name} is {guidance!r}; it must be a number from 0 to 1000")
    fps = request.fps
    if fps is not None and not (isinstance(fps, Fraction) and 0 < fps <= 1000):
        shown = str(fps) if isinstance(fps, Fraction) else repr(fps)
        problems.append(f"fps is {shown}; it must be a Fraction above 0 and at most 1000")
    named = request.attention
    if not isinstance(named, Mapping) or not all(isinstance(part, str) for pair in named.items() for part in pair):
        problems.append(f'attention is {named!r}; it must map names to backends, as in {{"transformer.self": "sdpa"}}')
    return problems


def request_error(problems: Sequence[str]) -> RequestError:
    """One error for everything wrong with a request; each problem begins with its field's name: "width is 60; ..."."""
    fields = [problem.split(" ", 1)[0] for problem in problems]
    return RequestError("; ".join(problems), fields=fields, problems=list(problems))


def draw_seed() -> int:
    """A random seed, short enough to be read out and typed again; a given one can be anything below 2**63."""
    return secrets.randbits(32)


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
    """One generated clip. `path` is None until it is saved, `pixels` None where it was read from JSON."""

    seed: int
    num_frames: int
    height: int
    width: int
    fps: Fraction
    path: Path | None = None
    pixels: "NDArray[np.uint8] | None" = field(default=None, repr=False, compare=False)

    @classmethod
    def from_frames(cls, frames: "NDArray[np.uint8]", *, seed: int, fps: Fraction) -> Self:
        """The clip of these frames, uint8 [frames, height, width, 3]."""
        num_frames, height, width, _ = frames.shape
        return cls(seed=seed, num_frames=num_frames, height=height, width=width, fps=fps, pixels=frames)

    @property
    def frames(self) -> "NDArray[np.uint8]":
        """The frames, uint8 [frames, height, width, 3]; one is a still. OutputError where JSON left them behind."""
        if self.pixels is None:
            where = "it was never saved" if self.path is None else f"read them from {self.path}"
            raise OutputError(f"the output of seed {self.seed} comes from JSON, which holds no pixels; {where}")
        return self.pixels

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

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, fps: Fraction | None = None) -> Self:
        """Rebuild from `to_json` data. `fps` is the exact rate, where it is known; the data has it as a number."""
        exact = Fraction(data["fps"]) if fps is None else fps
        return cls(**{**data, "path": None if data["path"] is None else Path(data["path"]), "fps": exact})


@dataclass(frozen=True, kw_only=True)
class AttentionCheck:
    """That a kernel was found to agree with the reference in layers of one kind (`--check-attention`).

    `error` is the largest that was found, measured against the size of the output, and `allowed` what was allowed
    there; `layer` had it. `calls` counts the engine's calls that were checked so far.
    """

    component: str
    role: str
    backend: str
    layer: str
    calls: int
    error: float
    allowed: float

    def __str__(self) -> str:
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        return (
            f"{self.component}.{self.role}: {self.backend} agrees with the reference in {calls}, "
            f"off by {self.error:.2g} of {self.allowed:.2g} allowed"
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The check as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a request gave: outputs, the attention plan that ran, the resolved request, timings and warnings.

    `request` has no None left but a negative prompt that wasn't used. `timings_s` maps a stage to seconds.
    `attention_checks` are there if kernels were checked.
    """

    outputs: tuple[Output, ...]
    plan: "AttentionPlan"
    request: Request
    model: str
    timings_s: Mapping[str, float]
    warnings: tuple[str, ...] = ()
    attention_checks: tuple[AttentionCheck, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The public JSON of `generate --json`; "attention_checks" is there if kernels were checked."""
        checks = [check.to_json() for check in self.attention_checks]
        return {
            "outputs": [output.to_json() for output in self.outputs],
            "plan": self.plan.to_json(),
            "request": self.request.to_json(),
            "timings_s": dict(self.timings_s),
            "warnings": list(self.warnings),
            "model": self.model,
            **({"attention_checks": checks} if checks else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json` data; the outputs have no pixels."""
        from safelight.attention.plan import AttentionPlan

        request = Request.from_json(data["request"])
        return cls(
            outputs=tuple(Output.from_json(output, fps=request.fps) for output in data["outputs"]),
            plan=AttentionPlan.from_json(data["plan"]),
            request=request,
            model=data["model"],
            timings_s=dict(data["timings_s"]),
            warnings=tuple(data["warnings"]),
            attention_checks=tuple(map(AttentionCheck.from_json, data.get("attention_checks", ()))),
        )

    def save(self, path: str | Path, *, overwrite: bool = False) -> "Result":
        """Write every output, and return the result with their paths.

        One frame is a PNG, more an MP4; several outputs are numbered name-0, name-1, ... An existing file is refused
        unless `overwrite`. Nothing is left half-written. Raises OutputError and WriteError.
        """
        from safelight.media import save_result

        return save_result(self, Path(path), overwrite=overwrite)
