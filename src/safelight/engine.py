"""Engine: a model on a machine. Facts make a plan, the plan binds kernels, requests become results."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from safelight.attention.backend import AttentionBackend
from safelight.attention.grid import Grid
from safelight.attention.lock import check_lock
from safelight.attention.machine import this_machine
from safelight.attention.plan import AttentionPlan, build_plan
from safelight.attention.ranking import SavedRanking, saved_ranking
from safelight.attention.select import by_name, found_backends
from safelight.config import Settings, as_settings
from safelight.errors import GenerationError, RequestError
from safelight.pipelines import Checkpoint, ParallelCheckpoint, Pipeline
from safelight.planning import (
    DEMO_NAME,
    Sources,
    check_model,
    check_parallel,
    chosen_check,
    chosen_device,
    chosen_dtype,
    not_parallel,
    preference_sources,
    request_sources,
)
from safelight.platforms import load_machine, probe_machine, torch_device
from safelight.platforms.facts import MachineFacts
from safelight.request import CancelToken, Output, Progress, Request, Result, draw_seed, parse_fps
from safelight.weights.model_index import folder_digest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from safelight.attention.guard import Guard
    from safelight.attention.runtime import LoadedPlan
    from safelight.distributed.mesh import Mesh
    from safelight.sampling.denoise import StepState

T = TypeVar("T")

Report = Callable[[Progress], None]


class Engine:
    """A loaded model, ready for requests. Make one with `from_pretrained`."""

    def __init__(
        self,
        *,
        model: str,
        checkpoint: Checkpoint,
        machine: MachineFacts,
        dtype: str,
        sources: Sources,
        backends: Mapping[str, AttentionBackend],
        plan_lock: AttentionPlan | None = None,
        measured: SavedRanking | None = None,
        check: str = "off",
        mesh: "Mesh | None" = None,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.machine = machine
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._sources = sources
        self._backends = backends
        self._plan_lock = plan_lock
        self._measured = SavedRanking() if measured is None else measured
        self._check = check
        self._mesh = mesh
        self._device = device
        self._grid = Grid() if mesh is None else mesh.grid
        self._guard: Guard | None = None
        self._loaded: dict[Sources, LoadedPlan] = {}
        self._bound: LoadedPlan | None = None
        self._pipeline: Pipeline | None = None
        self._lock = threading.RLock()
        self._planning = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        attention: str | Mapping[str, str] | None = None,
        attention_source: str = "`attention` argument",
        device: str | None = None,
        dtype: str | None = None,
        machine: MachineFacts | str | Path | None = None,
        check_attention: str | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
        plan_lock: AttentionPlan | None = None,
        mesh: "Mesh | None" = None,
        report: Report | None = None,
    ) -> Self:
        """Open a model: a folder in diffusers' layout, a hub id, or None for the demo.

        `attention` names backends ("sdpa", or {"transformer.self": "sdpa"}); `device` is a platform's name ("cuda",
        "cuda:1", "cpu"), None the best there is; `dtype` "float32", "bfloat16" or "float16", None the platform's own.
        `settings` are used where an argument is None; a plain mapping can't say who set its values, so the attention in
        it is only preferred (S2). With `plan_lock` every plan must run the very kernels of that one (S14).
        `check_attention` holds the kernels to the reference while they run: "first" in the first call of each kind of
        layer, "always" in every call, None or "off" never. `machine` is planned for in place of this one, by its facts
        or a name or file as for `load_machine`; the model runs on this machine's `device` all the same. With a `mesh`
        this is one rank of a parallel run: all of them make the same calls, and the first alone decodes. Everything is
        checked, the attention plan is made and its kernels loaded, before any weight is. Raises RequestError,
        CheckpointError and SelectionError, and on a mesh RankError.
        """
        started_s = time.monotonic()
        planned: Callable[[], Self] = partial(
            cls._planned,
            model,
            attention=attention,
            attention_source=attention_source,
            device=device,
            dtype=dtype,
            machine=machine,
            check_attention=check_attention,
            settings=settings,
            plan_lock=plan_lock,
            mesh=mesh,
        )
        engine = planned() if mesh is None else agreed(mesh, planned, lambda engine: engine._identity())

        def loaded(step: int, num_steps: int) -> None:
            _tell(report, "load", step, num_steps, started_s)

        checkpoint, where = engine._checkpoint, engine._device
        if isinstance(checkpoint, ParallelCheckpoint):
            engine._pipeline = checkpoint.load(engine.dtype, where, loaded, mesh)
        else:
            engine._pipeline = checkpoint.load(engine.dtype, where, loaded)
        return engine

    @classmethod
    def _planned(
        cls,
        model: str | Path | None,
        *,
        attention: str | Mapping[str, str] | None,
        attention_source: str,
        device: str | None,
        dtype: str | None,
        machine: MachineFacts | str | Path | None,
        check_attention: str | None,
        settings: Settings | Mapping[str, Any] | None,
        plan_lock: AttentionPlan | None,
        mesh: "Mesh | None",
    ) -> Self:
        """The engine before its weights are loaded: everything is checked, and its plan's kernels are there."""
        settings = as_settings(settings or Settings())
        model = model if model is not None else (settings.model.value if settings.model else None)
        checkpoint = check_model(model)
        asked_device, source = chosen_device(device, settings)
        sources = preference_sources(argument=attention, argument_source=attention_source, settings=settings)
        check = chosen_check(check_attention, settings)
        backends = found_backends()
        if machine is None:
            here = facts = this_machine(backends, asked_device, source=source)
        else:
            here = probe_machine(asked_device, source=source)
            facts = machine if isinstance(machine, MachineFacts) else load_machine(machine)
        engine = cls(
            model=DEMO_NAME if model is None else str(model),
            checkpoint=checkpoint,
            machine=facts,
            dtype=chosen_dtype(dtype, settings, facts),
            sources=sources,
            backends=by_name(backends),
            plan_lock=plan_lock,
            # This machine's times say nothing about another.
            measured=saved_ranking(facts) if machine is None else SavedRanking(),
            check=check,
            mesh=mesh,
            device=torch_device(here, asked_device),
        )
        if mesh is not None and not isinstance(checkpoint, ParallelCheckpoint):
            raise not_parallel(engine.model)
        engine.plan()
        return engine

    def resolve(self, request: Request) -> Request:
        """The request with the model's defaults and a seed filled in, checked against the model and the machine.

        Raises RequestError for what the model can't do, with the nearest it can, and SelectionError.
        """
        resolved = self._checkpoint.resolve(request)
        if resolved.seed is None:
            resolved = resolved.replace(seed=draw_seed())
        check_parallel(self._checkpoint, self._grid, resolved)
        self.plan(resolved)
        return resolved

    def plan(self, request: Request | None = None) -> AttentionPlan:
        """The attention plan for a request, or for one that prefers nothing of its own. Its kernels are loaded."""
        return self._load_plan(request).plan

    def _load_plan(self, request: Request | None) -> "LoadedPlan":
        sources = request_sources({} if request is None else request.attention, self._sources)
        with self._planning:
            if sources not in self._loaded:
                self._loaded[sources] = self._plan_anew(sources)
            return self._loaded[sources]

    def _plan_anew(self, sources: Sources) -> "LoadedPlan":
        from safelight.attention.runtime import load_plan

        groups = self._checkpoint.layer_groups(self.dtype)

        def plan_for(machine: MachineFacts) -> AttentionPlan:
            return build_plan(
                groups,
                machine,
                sources,
                self._backends,
                runs_here=True,
                measured=self._measured.ranking,
                grid=self._grid,
            )

        loaded = load_plan(plan_for, self.machine, self._backends)
        self.machine = loaded.plan.machine  # which knows now what couldn't be loaded
        if self._plan_lock is not None:
            check_lock(self._plan_lock, loaded.plan)
        _log_plan(loaded.plan)
        return loaded

    @overload
    def generate(self, request: Request | str, *, report: Report | None = None, **fields: Any) -> Result: ...

    @overload
    def generate(self, request: Sequence[Request], *, report: Report | None = None, **fields: Any) -> list[Result]: ...

    def generate(
        self, request: Request | str | Sequence[Request], *, report: Report | None = None, **fields: Any
    ) -> Result | list[Result]:
        """Run a request, a prompt with Request's fields as keywords, or a list of requests.

        Requests on one engine run one after the other, also from several threads. On a mesh every rank makes the same
        calls in the same order; they take the first one's seed where they have none, all stop at a step where one is
        cancelled, and the results of the others have no outputs. Raises RequestError before any work, GenerationError
        if the run fails (G5), and Cancelled.
        """
        if not isinstance(request, str | Request | Sequence) or isinstance(request, bytes):
            raise RequestError(f"the request is {request!r}; it must be a prompt, a Request or a list of Requests")
        if isinstance(request, str):
            return self._generate([Request(prompt=request, **_as_fields(fields))], report)[0]
        if isinstance(request, Request):
            return self._generate([request.replace(**_as_fields(fields)) if fields else request], report)[0]
        wrong = [one for one in request if not isinstance(one, Request)]
        if wrong:
            raise RequestError(f"the list holds {wrong[0]!r}; each must be a Request, as in Request(prompt=...)")
        return self._generate([one.replace(**_as_fields(fields)) if fields else one for one in request], report)

    def _generate(self, requests: Sequence[Request], report: Report | None) -> list[Result]:
        """The results of requests, all of which are checked before the first one runs."""
        # Ranks meet in every part of this; alone, a request is checked while another one runs.
        with contextlib.nullcontext() if self._mesh is None else self._lock:
            return [self._generate_one(one, report) for one in [self._alike(one) for one in requests]]

    def _generate_one(self, request: Request, report: Report | None) -> Result:
        import torch

        from safelight.sampling.noise import output_seeds

        cancel, shared = request.cancel, request.cancel
        if self._mesh is not None:
            from safelight.distributed.agreement import SharedCancel

            shared = SharedCancel(self._mesh.world, cancel)
        loaded = self._load_plan(request)
        pipeline = self._pipeline
        assert pipeline is not None, "from_pretrained loads the pipeline"
        assert request.seed is not None and request.fps is not None
        seeds = output_seeds(request.seed, request.num_outputs)
        run = _Run(pipeline, request.replace(cancel=shared), loaded.plan, self.dtype, report)
        with self._lock, torch.inference_mode():
            if shared is not None:
                shared.raise_if_cancelled()
            self._bind(loaded)
            text, warnings = run.encode()
            latents = run.denoise(text, seeds)
            frames = run.decode(latents, cancel) if self._mesh is None or self._mesh.is_first else []
            checks = () if self._guard is None else self._guard.checks(loaded.plan)
        return Result(
            outputs=tuple(
                Output.from_frames(clip, seed=seed, fps=request.fps) for clip, seed in zip(frames, seeds, strict=False)
            ),
            plan=loaded.plan,
            request=request.replace(cancel=None),
            model=self.model,
            timings_s={name: round(seconds, 6) for name, seconds in run.timings_s.items()},
            warnings=(*self._measured.notes, *self._checkpoint.warnings(request), *warnings),
            attention_checks=checks,
        )

    def _alike(self, request: Request) -> Request:
        """The resolved request; on a mesh, the same on every rank."""
        mesh = self._mesh
        if mesh is None:
            return self.resolve(request)
        if request.seed is None and mesh.is_first:
            request = request.replace(seed=draw_seed())
        first_seed = mesh.world.gather_values(request.seed)[0]
        if request.seed is None:
            request = request.replace(seed=first_seed)
        # First what was asked, in its own words: what comes of it may be an error.
        agreed(mesh, lambda: request, Request.to_json)
        return agreed(
            mesh,
            lambda: self.resolve(request),
            lambda resolved: {**resolved.to_json(), "plan": _kernels(self.plan(resolved))},
        )

    def _identity(self) -> dict[str, Any]:
        """What the engines of all ranks must have in common."""
        return {
            "model": folder_digest(self._checkpoint.folder),
            "dtype": self.dtype,
            "check_attention": self._check,
            "plan": _kernels(self.plan()),
        }

    def _bind(self, loaded: "LoadedPlan") -> None:
        """Give every attention layer the kernel that the plan names for it."""
        from safelight.attention.guard import Guard
        from safelight.attention.runtime import bind

        assert self._pipeline is not None
        if loaded is not self._bound:
            self._bound = None  # until all of them are
            if self._check != "off" and self._guard is None:
                self._guard = Guard(self._check)
            links = None if self._mesh is None else (self._mesh.ulysses, self._mesh.ring)
            for component, module in self._pipeline.modules.items():
                bind(component, module, loaded, self._guard, links)
            self._bound = loaded


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

    def decode(self, latents: "Sequence[torch.Tensor]", cancel: CancelToken | None) -> "list[NDArray[np.uint8]]":
        """The frames of every output, uint8 [frames, height, width, 3]; one at a time, for the memory they take."""
        import torch

        tell = self._stage("decode")
        tell(0, len(latents))
        clips = []
        for i, latents_BCFHW in enumerate(latents):
            if cancel is not None:
                cancel.raise_if_cancelled()

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
        is_plain = {layer.selection.backend for layer in self.plan.layers} == {"sdpa"}
        tries = [] if is_plain else ["--attention sdpa"]
        tries += [] if self.dtype == "float32" else ["--dtype float32"]
        remedy = f"try {' or '.join(tries)}" if tries else "the model's weights may be damaged"
        lines = self.plan.lines()
        return GenerationError(f"{what} ({'; '.join(lines)}, dtype {self.dtype}); {remedy}", plan=lines, **where)


def agreed(mesh: "Mesh", make: Callable[[], T], values: Callable[[T], Mapping[str, Any]]) -> T:
    """What `make()` gives, where the ranks of a mesh agree on `values` of it."""
    from safelight.distributed.agreement import agree

    return agree(mesh.world, make, values)


def _log_plan(plan: AttentionPlan) -> None:
    """One line per component, and at debug level who was refused and why (S13)."""
    log = logging.getLogger("safelight.attention")
    for line in plan.lines():
        log.info("%s", line)
    for layer in plan.layers:
        for verdict in layer.selection.rejected:
            reasons = "; ".join(reason.detail for reason in verdict.reasons)
            log.debug(
                "%s.%s: not %s: %s", layer.requirements.component, layer.requirements.role, verdict.backend, reasons
            )


def _kernels(plan: AttentionPlan) -> list[str]:
    """What runs in which layers, the same wherever the plan was made."""
    return [
        f"{layer.requirements.component}.{layer.requirements.role} x{layer.count} {layer.selection.backend}"
        for layer in plan.layers
    ]


def _as_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as a person writes them, as Request's fields: fps may be a number, attention a name."""
    unknown = sorted(set(fields) - set(Request.__dataclass_fields__))
    if unknown:
        allowed = ", ".join(Request.__dataclass_fields__)
        raise RequestError(f"a request has no {', '.join(unknown)}; its fields are {allowed}", fields=unknown)
    converted = dict(fields)
    if isinstance(converted.get("fps"), int | float | str):
        converted["fps"] = parse_fps(converted["fps"])
    if isinstance(converted.get("attention"), str):
        converted["attention"] = {"": converted["attention"]}
    return converted


def _tell(report: Report | None, stage: str, step: int, num_steps: int, started_s: float) -> None:
    if report is not None:
        elapsed_s = time.monotonic() - started_s
        remaining_s = elapsed_s / step * (num_steps - step) if step else None
        report(Progress(stage=stage, step=step, num_steps=num_steps, elapsed_s=elapsed_s, remaining_s=remaining_s))
