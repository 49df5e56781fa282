"""Classifier-free guidance (Ho and Salimans 2022, equation 6)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def branches(guidance_scale: float) -> int:
    """How many branches a scale needs: 1 or less runs the prompt alone."""
    return 2 if guidance_scale > 1 else 1


def guide(conditional: "Tensor", unconditional: "Tensor", guidance_scale: float) -> "Tensor":
    """Push the prediction away from the unconditional one."""
    return unconditional + guidance_scale * (conditional - unconditional)
