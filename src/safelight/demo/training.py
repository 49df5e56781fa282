"""What the demo's training stages share: averaged weights, resumable state, schedules and progress lines."""

import copy
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


class Stateful(Protocol):
    """Anything whose state is kept in a training checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Take a kept state."""
        ...


class Weights:
    """An exponential moving average of a module's parameters."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: value.detach().clone() for name, value in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Move the average towards the module; early steps average less, so that the start is forgotten."""
        decay = min(self.decay, (1 + step) / (10 + step))
        names = list(self.average)
        parameters = dict(module.named_parameters())
        torch._foreach_lerp_([self.average[n] for n in names], [parameters[n].detach() for n in names], 1 - decay)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Give the module the averaged values."""
        for name, value in module.named_parameters():
            value.copy_(self.average[name])

    def state_dict(self) -> dict[str, Any]:
        """The average by parameter name."""
        return copy.copy(self.average)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a kept average."""
        self.average = state


def step_seed(seed: int, step: int) -> int:
    """The seed of one training step's data, from its recipe's seed."""
    return seed * 1_000_003 + step


def step_generator(seed: int, step: int) -> torch.Generator:
    """A generator that depends on the step alone, so that a resumed run sees the data it would have seen."""
    return torch.Generator().manual_seed(step_seed(seed, step))


def cosine(step: int, total: int, *, warmup: int, floor: float = 0.02) -> float:
    """Learning-rate factor: linear warm-up, then half a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def save_state(path: Path, step: int, **parts: Stateful) -> None:
    """Write a checkpoint of `step` and every part's state."""
    save_whole(path, {"step": step, **{name: part.state_dict() for name, part in parts.items()}})


def save_whole(path: Path, value: object) -> None:
    """torch.save to a temporary name, then renamed: a killed run leaves the old file or the new one."""
    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    os.replace(temporary, path)


def load_state(path: Path, **parts: Stateful) -> int:
    """Restore a checkpoint into its parts and return its step; 0 if there is none."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["step"]


class Progress:
    """A line every so many steps: step, running means, seconds per step."""

    def __init__(self, stage: str, total: int, report: Callable[[str], None], every: int = 100) -> None:
        self.stage, self.total, self.report, self.every = stage, total, report, every
        self.sums: dict[str, float] = {}
        self.count = 0
        self.since = time.monotonic()

    def update(self, step: int, **values: float) -> None:
        """Add one step's values and report when due."""
        self.count += 1
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if step % self.every == 0 or step == self.total:
            seconds = (time.monotonic() - self.since) / self.count
            means = " ".join(f"{name}={total / self.count:.4g}" for name, total in self.sums.items())
            self.report(f"{self.stage} {step}/{self.total} {means} {seconds:.3f} s/step")
            self.sums, self.count, self.since = {}, 0, time.monotonic()
