"""Flow matching: the shifted schedule and Euler's method.

Lipman et al. 2023; Esser et al. 2024, section 3.1 and equation 23. Latents are x = (1 - sigma) * data + sigma * noise,
and the model predicts the velocity noise - data.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from safelight.sampling.schedulers import check_scheduler


class Solver(Protocol):
    """One request's way from noise to data. `timesteps` [steps] is what the model is given."""

    timesteps: Tensor

    def step(self, i: int, velocity: Tensor, latents: Tensor) -> Tensor:
        """The latents after step i, float32; steps are taken in order."""
        ...


def shifted_sigmas(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Tensor:
    """Noise levels from 1 to 0, float32 [num_steps + 1], spent more on high noise as `shift` grows.

    Spaced as diffusers' FlowMatchEulerDiscreteScheduler does: evenly between 1 and the smallest shifted training
    level, then shifted.
    """
    smallest = shift / num_train_timesteps / (1 + (shift - 1) / num_train_timesteps)
    sigmas = torch.linspace(1.0, smallest, num_steps, dtype=torch.float64, device="cpu")
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    return torch.cat((sigmas, sigmas.new_zeros(1))).float()


class Euler:
    """Euler's method on given noise levels [steps + 1]."""

    def __init__(self, sigmas: Tensor, num_train_timesteps: int = 1000) -> None:
        self.sigmas = sigmas
        self.timesteps = sigmas[:-1] * num_train_timesteps
        self._steps = (sigmas[1:] - sigmas[:-1]).tolist()

    def step(self, i: int, velocity: Tensor, latents: Tensor) -> Tensor:
        """Follow the velocity to the next noise level."""
        return torch.add(latents, velocity.float(), alpha=self._steps[i])


class LibrarySolver:
    """A diffusers scheduler as a solver, for checkpoints that name one we don't have ourselves."""

    def __init__(self, class_name: str, config: Mapping[str, Any], num_steps: int) -> None:
        import diffusers

        self._scheduler = getattr(diffusers, class_name).from_config(dict(config))
        self._scheduler.set_timesteps(num_steps, device="cpu")
        self._scheduler.set_begin_index(0)
        self.timesteps = self._scheduler.timesteps

    def step(self, i: int, velocity: Tensor, latents: Tensor) -> Tensor:
        """One step of the library's scheduler."""
        after: Tensor = self._scheduler.step(velocity.float(), self.timesteps[i], latents, return_dict=False)[0]
        return after


def solver_from_config(config: Mapping[str, Any], num_steps: int, where: str = "scheduler") -> Solver:
    """The solver that a checkpoint's scheduler_config.json names. Raises CheckpointError for one we can't run."""
    check_scheduler(config, where)
    name = config["_class_name"]
    options = {key: value for key, value in config.items() if not key.startswith("_")}
    plain = {"shift_terminal": None, "time_shift_type": "exponential"}
    special = {k for k, v in options.items() if k.startswith(("use_", "invert", "stochastic")) and v}
    special |= {k for k, default in plain.items() if options.get(k, default) != default}
    if name == "FlowMatchEulerDiscreteScheduler" and not special:
        num_train = options.get("num_train_timesteps", 1000)
        return Euler(shifted_sigmas(num_steps, options.get("shift", 1.0), num_train), num_train)
    return LibrarySolver(name, options, num_steps)
