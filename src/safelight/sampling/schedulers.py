"""Which schedulers a checkpoint's scheduler_config.json may name. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from safelight.errors import CheckpointError

SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")


def check_scheduler(config: Mapping[str, Any], where: str = "scheduler") -> None:
    """Raise CheckpointError, with everything that is wrong, for a scheduler that we can't run."""
    problems = []
    name = config.get("_class_name")
    if name not in SCHEDULERS:
        problems.append(f"_class_name is {name!r}; the schedulers are {', '.join(SCHEDULERS)}")
    if config.get("use_dynamic_shifting"):
        problems.append("use_dynamic_shifting is set; the shift must be a number that doesn't depend on the request")
    if config.get("stochastic_sampling"):
        problems.append("stochastic_sampling is set; a step's noise must come from its output's seed, and it wouldn't")
    if name == "UniPCMultistepScheduler":
        # Its defaults are those of noise prediction, where our models predict a velocity.
        wanted = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
        problems += [f"{k} is {config.get(k)!r}; it must be {v!r}" for k, v in wanted.items() if config.get(k) != v]
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}", problems=problems)
