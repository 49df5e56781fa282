"""Rotary position embedding over a (t, h, w) token grid (Su et al. 2021, RoFormer; split over axes as Wan does)."""

import torch
from torch import Tensor


def rotary_table(
    grid: tuple[int, int, int],
    axes_dim: tuple[int, int, int],
    theta: float = 10000.0,
    device: torch.device | None = None,
) -> Tensor:
    """Rotations for a grid of tokens, as complex64 [tokens, head_dim / 2] on `device`.

    Angles are computed in float64 on the CPU, so that every device rotates by the same numbers. Devices without
    complex numbers get float32 [tokens, head_dim / 2, 2], cosine and sine.
    """
    parts = []
    for axis, (length, dim) in enumerate(zip(grid, axes_dim, strict=True)):
        frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), frequency)
        shape = [1, 1, 1, dim // 2]
        shape[axis] = length
        parts.append(angle.view(shape).expand(*grid, dim // 2))
    angle = torch.cat(parts, dim=-1).flatten(0, 2)
    table = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    if device is not None and device.type not in ("cpu", "cuda"):
        return torch.view_as_real(table).to(device)
    return table.to(device)


def rotate(x_BSHD: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of features by the table's angles, in float32; the result has x's dtype."""
    pairs = x_BSHD.float().unflatten(-1, (-1, 2))
    if table.is_complex():
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * table[:, None])
    else:
        cos, sin = table[:, None].unbind(-1)
        x, y = pairs.unbind(-1)
        rotated = torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1)
    return rotated.flatten(-2).type_as(x_BSHD)
