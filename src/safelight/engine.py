"""Engine: a model on a machine. Facts make a plan, the plan binds kernels, requests become results."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

from safelight.attention.backend import AttentionBackend
from safelight.attention.plan import AttentionPlan, build_plan
from safelight.attention.select import BackendPreference, declared_backends
from safelight.catalog import declarations
from safelight.config import DTYPES, AttentionChoice, Settings, attention_choices
from safelight.errors import CheckpointError, GenerationError, RequestError
from safelight.pipelines.family import Checkpoint, Family, Pipeline
from safelight.platforms import platform_named, probe_machine, torch_device
from safelight.platforms.facts import MachineFacts
from safelight.request import Output, Progress, Request, Result, parse_fps
from safelight.weights.hub import resolve_model
from safelight.weights.model_index import read_model_index

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from safelight.sampling.denoise import StepState

DEMO = Path(__file__).parent / "demo" / "checkpoint"
DEMO_NAME = "demo"

Report = Callable[[Progress], None]


def check_model(model: str | Path | None) -> Checkpoint:
    """Read a model's configurations and file headers; None is the demo. Imports no torch.

    Raises CheckpointError for everything that can be seen without loading weights.
    """
    folder = DEMO if model is None else resolve_model(model)
    index = read_model_index(folder)
    families = declarations("safelight.pipelines", "FAMILY", "safelight.models", besides=("family", "wan")).declarations
    by_class: dict[str, Family] = {family.class_name: family for family in families}
    if index.class_name not in by_class:
        raise CheckpointError(
            f"{index.path}: _class_name is {index.class_name}; the pipelines are {', '.join(sorted(by_class))}",
            allowed=sorted(by_class),
        )
    return by_class[index.class_name].open(index)


class Engine:
    """A loaded model, ready for requests. Make one with `from_pretrained`."""

    def __init__(
        self,
        *,
        model: str,
        checkpoint: Checkpoint,
        machine: MachineFacts,
        dtype: str,
        preferences: Sequence[Sequence[BackendPreference]],
        backends: Mapping[str, AttentionBackend],
    ) -> None:
        self.model = model
        self.machine = machine
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._preferences = preferences
        self._backends = backends
        self._plans: dict[tuple[tuple[str, str], ...], AttentionPlan] = {}
        self._bound: AttentionPlan | None = None
        self._pipeline: Pipeline | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        attention: str | Mapping[str, str] | None = None,
        attention_source: str = "`attention` argument",
        device: str | None = None,
        dtype: str | None = None,
        settings: Settings | None = None,
        report: Report | None = None,
    ) -> Self:
        """Open a model: a folder in diffusers' layout, a hub id, or None for the demo.

        `attention` names backends ("sdpa", or {"transformer.self": "sdpa"}); `device` is a platform's name ("cuda",
        "cuda:1", "cpu"), None the best there is; `dtype` "float32", "bfloat16" or "float16", None the platform's own.
        `settings` are used where an argument is None. Everything is checked, the attention plan included, before any
        weight is loaded. Raises RequestError, CheckpointError and SelectionError.
        """
        settings = settings or Settings()
        started_s = time.monotonic()
        model = model if model is not None else (settings.model.value if settings.model else None)
        checkpoint = check_model(model)
        asked_device, source = device, None
        if device is None and settings.device is not None:
            asked_device, source = settings.device.value, settings.device.source
        machine = probe_machine(asked_device, source=source)
        if dtype is None:
            dtype = settings.dtype.value if settings.dtype else platform_named(machine.platform).default_dtype(machine)
        if dtype not in DTYPES:
            raise RequestError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
        given = {"": attention} if isinstance(attention, str) else dict(attention or {})
        engine = cls(
            model=DEMO_NAME if model is None else str(model),
            checkpoint=checkpoint,
            machine=machine,
            dtype=dtype,
            preferences=(
                _explicit(attention_choices(given, attention_source)),
                _explicit(settings.attention),
            ),
            backends=declared_backends(),
        )
        engine.plan()

        def loaded(step: int, num_steps: int) -> None:
            _tell(report, "load", step, num_steps, started_s)

        engine._pipeline = checkpoint.load(dtype, torch_device(machine, asked_device), loaded)
        return engine

    def resolve(self, request: Request) -> Request:
        """The request with the model's defaults and a seed filled in, checked against the model and the machine.

        Raises RequestError for what the model can't do, with the nearest it can, and SelectionError.
        """
        resolved = self._checkpoint.resolve(request)
        if resolved.seed is None:
            resolved = resolved.replace(seed=secrets.randbits(32))
        self.plan(resolved)
        return resolved

    def plan(self, request: Request | None = None) -> AttentionPlan:
        """The attention plan for a request, or for one that prefers nothing of its own."""
        asked = {} if request is None else dict(request.attention)
        key = tuple(sorted(asked.items()))
        if key not in self._plans:
            sources = (_explicit(attention_choices(asked, "the request")), *self._preferences)
            groups = self._checkpoint.layer_groups(self.dtype)
            self._plans[key] = build_plan(groups, self.machine, sources, self._backends)
        return self._plans[key]

    @overload
    def generate(self, request: Request | str, *, report: Report | None = None, **fields: Any) -> Result: ...

    @overload
    def generate(self, request: Sequence[Request], *, report: Report | None = None, **fields: Any) -> list[Result]: ...

    def generate(
        self, request: Request | str | Sequence[Request], *, report: Report | None = None, **fields: Any
    ) -> Result | list[Result]:
        """Run a request, a prompt with Request's fields as keywords, or a list of requests.

        Requests on one engine run one after the other, also from several threads. Raises RequestError before any work,
        GenerationError if the run fails (G5), and Cancelled.
        """
        if isinstance(request, str):
            return self._generate(Request(prompt=request, **_as_fields(fields)), report)
        if isinstance(request, Request):
            return self._generate(request.replace(**_as_fields(fields)) if fields else request, report)
        requests = [one.replace(**_as_fields(fields)) if fields else one for one in request]
        resolved = [self.resolve(one) for one in requests]
        return [self._generate(one, report) for one in resolved]

    def _generate(self, request: Request, report: Report | None) -> Result:
        import torch

        from safelight.sampling.noise import output_seeds

        request = self.resolve(request)
        plan = self.plan(request)
        pipeline = self._pipeline
        assert pipeline is not None, "from_pretrained loads the pipeline"
        assert request.seed is not None and request.fps is not None
        seeds = output_seeds(request.seed, request.num_outputs)
        run = _Run(pipeline, request, plan, self.dtype, report)
        with self._lock, torch.inference_mode():
            run.check_cancelled()
            self._bind(plan)
            text, warnings = run.encode()
            latents = run.denoise(text, seeds)
            frames = run.decode(latents)
        return Result(
            outputs=tuple(
                Output(frames=clip, seed=seed, fps=request.fps) for clip, seed in zip(frames, seeds, strict=True)
            ),
            plan=plan,
            request=request.replace(cancel=None),
            model=self.model,
            timings_s={name: round(seconds, 6) for name, seconds in run.timings_s.items()},
            warnings=(*self._checkpoint.warnings(request), *warnings),
        )

    def _bind(self, plan: AttentionPlan) -> None:
        """Give every attention layer the kernel that the plan names for it."""
        from safelight.attention.runtime import bind

        assert self._pipeline is not None
        if plan is not self._bound:
            self._bound = None  # until all of them are
            for component, module in self._pipeline.modules.items():
                bind(component, module, plan, self._backends)
            self._bound = plan


class _Run:
    """One request on its way: its stages in order, what they are told and how long they take."""

    def __init__(
        self, pipeline: Pipeline, request: Request, plan: AttentionPlan, dtype: str, report: Report | None
    ) -> None:
        self.pipeline = pipeline
        self.request = request
        self.plan = plan
        self.dtype = dtype
        self.report = report
        self.timings_s: dict[str, float] = {}

    def check_cancelled(self) -> None:
        if self.request.cancel is not None:
            self.request.cancel.raise_if_cancelled()

    def encode(self) -> tuple[Any, tuple[str, ...]]:
        """The text as the pipeline wants it, and warnings."""
        tell = self._stage("encode")
        tell(0, 1)
        text, warnings = self.pipeline.encode(self.request)
        tell(1, 1)
        return text, warnings

    def denoise(self, text: Any, seeds: Sequence[int]) -> "list[torch.Tensor]":
        """The latents of every output."""
        import torch

        tell = self._stage("denoise")
        batches = list(self.pipeline.batches(self.request, seeds))
        latents: list[torch.Tensor] = []
        for i, batch in enumerate(batches):
            state: StepState | None = None
            for state in self.pipeline.denoise(self.request, text, batch):
                if not bool(torch.isfinite(state.latents.sum())):
                    raise self._failure(
                        f"the latents are not finite after step {state.step} of {state.num_steps}",
                        stage="denoise",
                        step=state.step,
                    )
                if i == 0 or state.step > 0:
                    tell(i * state.num_steps + state.step, len(batches) * state.num_steps)
            assert state is not None, "a pipeline yields the noise first"
            latents += state.latents.split(1)
        return latents

    def decode(self, latents: "Sequence[torch.Tensor]") -> "list[NDArray[np.uint8]]":
        """The frames of every output, uint8 [frames, height, width, 3]; one at a time, for the memory they take."""
        import torch

        tell = self._stage("decode")
        tell(0, len(latents))
        clips = []
        for i, latents_BCFHW in enumerate(latents):
            self.check_cancelled()

            def decoded(step: int, num_steps: int, i: int = i) -> None:
                tell(i * num_steps + step, len(latents) * num_steps)

            pixels_BFHWC = self.pipeline.decode(latents_BCFHW, decoded)
            if not bool(torch.isfinite(pixels_BFHWC.sum())):
                raise self._failure("the decoded frames are not finite", stage="decode")
            frames_FHWC = pixels_BFHWC[0].mul(255).round().to(torch.uint8).cpu()
            is_constant = bool((frames_FHWC == frames_FHWC[:1, :1, :1]).all())
            if is_constant and bool(latents_BCFHW.min() != latents_BCFHW.max()):
                colour = frames_FHWC[0, 0, 0].tolist()
                raise self._failure(
                    f"the decoded frames all have the one colour {colour}, though the latents vary", stage="decode"
                )
            clips.append(frames_FHWC.contiguous().numpy())
        return clips

    def _stage(self, name: str) -> Callable[[int, int], None]:
        """Begin a stage; what it gives is told how many steps are done, and of how many."""
        started_s = time.monotonic()

        def tell(step: int, num_steps: int) -> None:
            self.timings_s[name] = time.monotonic() - started_s
            _tell(self.report, name, step, num_steps, started_s)

        return tell

    def _failure(self, what: str, **where: Any) -> GenerationError:
        remedy = "try --attention sdpa" + ("" if self.dtype == "float32" else " or --dtype float32")
        lines = self.plan.lines()
        return GenerationError(f"{what} ({'; '.join(lines)}, dtype {self.dtype}); {remedy}", plan=lines, **where)


def _explicit(choices: Sequence[AttentionChoice]) -> tuple[BackendPreference, ...]:
    """What a person chose, as preferences."""
    return tuple(BackendPreference(choice.backend, choice.source, True, choice.names) for choice in choices)


def _as_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as a person writes them, as Request's fields: fps may be a number, attention a name."""
    converted = dict(fields)
    if isinstance(converted.get("fps"), int | float | str) and not isinstance(converted["fps"], Fraction):
        converted["fps"] = parse_fps(converted["fps"])
    if isinstance(converted.get("attention"), str):
        converted["attention"] = {"": converted["attention"]}
    return converted


def _tell(report: Report | None, stage: str, step: int, num_steps: int, started_s: float) -> None:
    if report is not None:
        elapsed_s = time.monotonic() - started_s
        remaining_s = elapsed_s / step * (num_steps - step) if step else None
        report(Progress(stage=stage, step=step, num_steps=num_steps, elapsed_s=elapsed_s, remaining_s=remaining_s))
