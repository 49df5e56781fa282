"""Initial noise: per output, on the CPU, in float32, so that a seed means the same everywhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

SEED_LIMIT = 2**63


def output_seeds(seed: int, num_outputs: int) -> list[int]:
    """The seed of each output: (seed + i) mod 2**63."""
    return [(seed + i) % SEED_LIMIT for i in range(num_outputs)]


def draw_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Standard normal noise, float32 on the CPU, [len(seeds), *shape]; each row depends on its own seed alone."""
    rows = [torch.randn((1, *shape), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.cat(rows)
