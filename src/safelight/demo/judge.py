"""Reads colour, shape and direction back from a clip by measurement, to score what the demo model drew.

No learned part: the ground is the border's median, coverage is the contrast against it, and then colour is the mean of
fully covered pixels, direction the centroid's path, shape two moments about the centroid: how strongly it repeats every
120 degrees, as a triangle does, and every 90 degrees, as a square with upright sides does. Axes: F frames, H height,
W width.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safelight.demo.scenes import COLOURS, DIRECTIONS

MIN_CONTRAST = 0.15
MIN_TRAVEL = 0.03
# Half of what a drawn triangle and a drawn square measure; a circle measures 0 in both.
TRIANGLE_ABOVE, SQUARE_ABOVE = 0.33, 0.215


@dataclass(frozen=True)
class Judgement:
    """What a clip shows; None where it can't be told. `threefold` and `fourfold` are the moments behind `shape`."""

    colour: str | None
    shape: str | None
    direction: str | None
    threefold: float = 0.0
    fourfold: float = 0.0


def judge(frames_FHWC: NDArray[np.uint8]) -> Judgement:
    """Measure a clip uint8 [frames, height, width, 3]. A still has no direction."""
    video = frames_FHWC.astype(np.float32) / 255
    border = np.concatenate(
        [
            video[:, 0].reshape(-1, 3),
            video[:, -1].reshape(-1, 3),
            video[:, :, 0].reshape(-1, 3),
            video[:, :, -1].reshape(-1, 3),
        ]
    )
    contrast_FHW = np.linalg.norm(video - np.median(border, axis=0), axis=-1)
    peak = float(np.quantile(contrast_FHW, 0.985))
    if peak < MIN_CONTRAST:
        return Judgement(None, None, None)
    coverage_FHW = np.clip((contrast_FHW / peak - 0.15) / 0.7, 0, 1).astype(np.float32)
    threefold, fourfold = _moments(coverage_FHW)
    shape = "triangle" if threefold > TRIANGLE_ABOVE else "square" if fourfold > SQUARE_ABOVE else "circle"
    return Judgement(_colour(video, coverage_FHW), shape, _direction(coverage_FHW), threefold, fourfold)


def _colour(video: NDArray[np.floating[Any]], coverage_FHW: NDArray[np.floating[Any]]) -> str | None:
    inside = video[coverage_FHW >= 1]
    if len(inside) == 0:
        return None
    distance = {name: float(np.linalg.norm(inside.mean(0) * 255 - np.array(rgb))) for name, rgb in COLOURS.items()}
    return min(distance, key=lambda name: distance[name])


def _direction(coverage_FHW: NDArray[np.float32]) -> str | None:
    height, width = coverage_FHW.shape[1:]
    mass_F = coverage_FHW.sum((1, 2))
    if len(mass_F) < 2 or mass_F.min() <= 0:
        return None
    x_F = (coverage_FHW.sum(1) * np.arange(width)).sum(1) / mass_F
    y_F = (coverage_FHW.sum(2) * np.arange(height)).sum(1) / mass_F
    # The slope of a straight line through the path: one bad frame doesn't decide.
    time_F = np.arange(len(x_F)) - (len(x_F) - 1) / 2
    travel = np.array([(time_F * x_F).sum(), (time_F * y_F).sum()]) / (time_F**2).sum() * (len(x_F) - 1)
    if np.abs(travel).max() < MIN_TRAVEL * min(height, width):
        return None
    return max(DIRECTIONS, key=lambda name: float(np.dot(travel, DIRECTIONS[name])))


def _moments(coverage_FHW: NDArray[np.float32]) -> tuple[float, float]:
    """Threefold and fourfold symmetry: sum of z**n over sum of |z|**n, z from the centroid, mean over frames.

    A square's corners lie at 45 degrees, where z**4 is negative; a triangle's three directions make z**3 imaginary.
    """
    height, width = coverage_FHW.shape[1:]
    y_HW, x_HW = np.mgrid[:height, :width]
    threefold, fourfold = [], []
    for cover_HW in coverage_FHW:
        mass = max(float(cover_HW.sum()), 1e-6)
        z_HW = (x_HW - (cover_HW * x_HW).sum() / mass) + 1j * (y_HW - (cover_HW * y_HW).sum() / mass)
        spread_3, spread_4 = ((cover_HW * np.abs(z_HW) ** n).sum() + 1e-6 for n in (3, 4))
        threefold.append((cover_HW * z_HW**3).sum().imag / spread_3)
        fourfold.append(-(cover_HW * z_HW**4).sum().real / spread_4)
    return abs(float(np.mean(threefold))), float(np.mean(fourfold))
