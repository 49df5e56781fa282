"""Reads colour, shape and direction back from a clip by measurement, to score what the demo model drew.

No learned part: the ground is the border's median, coverage is the contrast against it, and then colour is the mean of
fully covered pixels, direction the centroid's path, shape the share of its bounding box that is filled (circle 0.79,
square 1, triangle 0.5). Axes: F frames, H height, W width.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from safelight.demo.scenes import COLOURS, DIRECTIONS

MIN_CONTRAST = 0.15
MIN_TRAVEL = 0.03
TRIANGLE_BELOW, SQUARE_ABOVE = 0.645, 0.89


@dataclass(frozen=True)
class Judgement:
    """What a clip shows; None where it can't be told. `fill` is the filled share of the bounding box."""

    colour: str | None
    shape: str | None
    direction: str | None
    fill: float


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
        return Judgement(None, None, None, 0.0)
    coverage_FHW = np.clip((contrast_FHW / peak - 0.15) / 0.7, 0, 1).astype(np.float32)
    fill = _fill(coverage_FHW)
    shape = "triangle" if fill < TRIANGLE_BELOW else "square" if fill > SQUARE_ABOVE else "circle"
    return Judgement(_colour(video, coverage_FHW), shape, _direction(coverage_FHW), fill)


def _colour(video: NDArray[np.float32], coverage_FHW: NDArray[np.float32]) -> str | None:
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


def _fill(coverage_FHW: NDArray[np.float32]) -> float:
    """Covered area over the area of the bounding box, both sub-pixel, median over frames."""
    area_F = coverage_FHW.sum((1, 2))
    width_F = coverage_FHW.max(1).sum(1)
    height_F = coverage_FHW.max(2).sum(1)
    return float(np.median(area_F / np.maximum(width_F * height_F, 1e-6)))
