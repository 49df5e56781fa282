"""Initial noise: per output, on the CPU, in float32, so that a seed means the same everywhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from safelight.request import SEED_LIMIT


def output_seeds(seed: int, num_outputs: int) -> list[int]:
    """The seed of each output: (seed + i) mod 2**63."""
    return [(seed + i) % SEED_LIMIT for i in range(num_outputs)]


def draw_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Standard normal noise, float32 on the CPU, [len(seeds), *shape]; each row depends on its own seed alone.

    A row is what `torch.Generator().manual_seed(seed)` gives everywhere else, diffusers included. That generator reads
    the low 32 bits: seeds that differ by a multiple of 2**32 give the same noise.
    """
    return torch.cat([_row(seed, shape) for seed in seeds])


def _row(seed: int, shape: Sequence[int]) -> Tensor:
    # Device and dtype are written out, since torch's defaults can be changed by whoever embeds this.
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((1, *shape), generator=generator, device="cpu", dtype=torch.float32)
