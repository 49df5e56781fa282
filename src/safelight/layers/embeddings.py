"""Sinusoidal timestep features (Ho et al. 2020, appendix B; cosines first, as diffusion transformers have them)."""

import math

import torch
from torch import Tensor


def timestep_features(timestep_N: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    """Cosines then sines of the timesteps at `dim` / 2 frequencies: float32 [N, dim]."""
    half = dim // 2
    exponent = -math.log(max_period) * torch.arange(half, dtype=torch.float32, device=timestep_N.device) / half
    angle = timestep_N[:, None].float() * exponent.exp()
    return torch.cat((angle.cos(), angle.sin()), dim=-1)
