"""An engine that takes no time: what the command line needs of the real one, and a record of what it was asked."""

import dataclasses
from fractions import Fraction
from pathlib import Path

import numpy as np

from safelight.attention.plan import AttentionPlan, LayerGroup, PlannedLayer
from safelight.attention.requirements import AttentionRequirements
from safelight.attention.select import Selection, Verdict
from safelight.cli import doctor, explain, facts, generate
from safelight.errors import CheckpointError
from safelight.platforms.facts import DeviceFacts, MachineFacts
from safelight.request import SEED_LIMIT, Output, Progress, Request, Result, request_error

MACHINE = MachineFacts(
    platform="cpu", devices=(DeviceFacts(arch="cpu-avx2", name="a processor"),), torch_version="2.13.0"
)


def plan_with(backend="sdpa"):
    requirements = AttentionRequirements(head_dim=64, dtype="float32", num_heads=4, num_kv_heads=4)
    selection = Selection(backend=backend, preference=None, reason="platform default", verdicts=(Verdict(backend),))
    layer = PlannedLayer(requirements=requirements, count=6, selection=selection)
    return AttentionPlan(machine=MACHINE, layers=(layer,))


class FakeCheckpoint:
    """A model whose sizes are multiples of 8; 9 frames of 64x64 at 8 fps in 4 steps unless asked."""

    def layer_groups(self, dtype):
        need = AttentionRequirements(head_dim=64, dtype=dtype, num_heads=4, num_kv_heads=4)
        return tuple(
            LayerGroup(requirements=need.replace(component=component, role=role), count=6)
            for component in ("transformer", "text_encoder")
            for role in ("self", "cross")
        )

    def resolve(self, request: Request) -> Request:
        defaults = {
            "width": 64,
            "height": 64,
            "num_frames": 9,
            "fps": Fraction(8),
            "num_steps": 4,
            "guidance_scale": 3.0,
        }
        missing = {name: value for name, value in defaults.items() if getattr(request, name) is None}
        request = request.replace(**missing)
        sides = {"width": request.width, "height": request.height}
        wrong = [f"{name} is {side}; it must be a multiple of 8" for name, side in sides.items() if side % 8]
        if wrong:
            raise request_error(wrong)
        return request


def open_checkpoint(model):
    """Any directory is a model here, and None is the demo."""
    if model is not None and not Path(model).is_dir():
        raise CheckpointError(f"no model in {model}")
    return FakeCheckpoint()


class FakeEngine:
    """Takes what FakeCheckpoint resolved. `during` is called before each denoising step."""

    model = "fake"
    machine = MACHINE
    dtype = "float32"

    def __init__(self, *, during=None, warnings=()):
        self.during = during
        self.warnings = warnings
        self.opened = []
        self.requests = []

    def open(self, model, *, report, **options):
        self.opened.append((model, options))
        return self

    def plan(self, request):
        return plan_with()

    def generate(self, request, *, report):
        self.requests.append(request)
        report(Progress(stage="encode", step=1, num_steps=1, elapsed_s=0.0))
        for step in range(request.num_steps):
            report(Progress(stage="denoise", step=step, num_steps=request.num_steps, elapsed_s=0.0))
            if self.during is not None:
                self.during()
            request.cancel.raise_if_cancelled()
        report(Progress(stage="decode", step=1, num_steps=1, elapsed_s=0.0))
        outputs = tuple(
            Output.from_frames(
                np.full((request.num_frames, request.height, request.width, 3), 40 * (index + 1), np.uint8),
                seed=(request.seed + index) % SEED_LIMIT,
                fps=request.fps,
            )
            for index in range(request.num_outputs)
        )
        return Result(
            outputs=outputs,
            plan=plan_with(),
            request=request,
            model=self.model,
            timings_s={"denoise": 0.25},
            warnings=self.warnings,
        )


def commands_with(engine):
    """The program's commands, with `engine` in place of the real one."""

    def run(line, console):
        generate.run(line, console, engine_factory=engine.open, checkpoint_factory=open_checkpoint)

    return (dataclasses.replace(generate.COMMAND, run=run), explain.COMMAND, doctor.COMMAND, facts.COMMAND)
