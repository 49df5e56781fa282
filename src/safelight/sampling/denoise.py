"""denoise(): from noise to latents, one step state at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from safelight.request import CancelToken
from safelight.sampling.flow import Solver


@dataclass(frozen=True)
class StepState:
    """Latents after `step` of `num_steps` steps; step 0 is the noise itself."""

    step: int
    num_steps: int
    latents: Tensor


def denoise(
    velocity: Callable[[Tensor, int], Tensor], noise: Tensor, solver: Solver, cancel: CancelToken | None = None
) -> Iterator[StepState]:
    """Yield the state before the first step and after each one.

    `velocity` is called with the latents and the step's index. Raises Cancelled before a step once `cancel` is set.
    """
    num_steps = len(solver.timesteps)
    latents = noise
    yield StepState(0, num_steps, latents)
    for i in range(num_steps):
        if cancel is not None:
            cancel.raise_if_cancelled()
        latents = solver.step(i, velocity(latents, i), latents)
        yield StepState(i + 1, num_steps, latents)
