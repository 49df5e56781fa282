"""Procedural scenes: moving shapes for the demo model, and colourful clutter that teaches its VAE.

Shapes are drawn from signed distances, so that edges are anti-aliased and motion is sub-pixel. Tensor names carry
their axes: B batch, N shapes in a scene, F frames, C colour channels, H height, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (228, 36, 42),
    "orange": (250, 140, 24),
    "yellow": (246, 222, 48),
    "green": (44, 184, 76),
    "cyan": (56, 214, 226),
    "blue": (44, 84, 232),
    "purple": (156, 64, 212),
    "white": (242, 242, 242),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

# Lengths are in units of the shorter image side, so that any size shows the same composition.
RADIUS = (0.140, 0.185)
SPEED_PER_FRAME = (0.020, 0.032)
MARGIN = 0.03
BACKGROUND = (14, 44)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One demo scene: a shape of one colour on a dark ground, moving at constant speed.

    `centre` is (x, y) in the first frame, `radius` and `speed` (per frame) likewise in units of the shorter side.
    `background` is one grey level, 0 to 255.
    """

    colour: str
    shape: str
    direction: str
    centre: tuple[float, float]
    radius: float
    speed: float
    background: int


def sample_scene(
    generator: torch.Generator,
    num_frames: int,
    *,
    colour: str | None = None,
    shape: str | None = None,
    direction: str | None = None,
    aspect: float = 1.0,
) -> Scene:
    """Draw a scene whose shape stays wholly inside the picture for `num_frames` frames.

    What isn't given is drawn uniformly. `aspect` is width / height.
    """
    colour = colour or _choose(tuple(COLOURS), generator)
    shape = shape or _choose(SHAPES, generator)
    direction = direction or _choose(tuple(DIRECTIONS), generator)
    radius = _uniform(*RADIUS, generator)
    speed = _uniform(*SPEED_PER_FRAME, generator)
    extent = (max(aspect, 1.0), max(1 / aspect, 1.0))
    travel = speed * (num_frames - 1)
    start = []
    for axis, step in enumerate(DIRECTIONS[direction]):
        low, high = radius + MARGIN, extent[axis] - radius - MARGIN
        if step > 0:
            high = max(low, high - travel)
        elif step < 0:
            low = min(high, low + travel)
        start.append(_uniform(low, high, generator))
    return Scene(
        colour=colour,
        shape=shape,
        direction=direction,
        centre=(start[0], start[1]),
        radius=radius,
        speed=speed,
        background=int(_uniform(*BACKGROUND, generator)),
    )


def render_scenes(scenes: Sequence[Scene], num_frames: int, height: int = 64, width: int = 64) -> Tensor:
    """Render demo scenes to float clips [batch, 3, frames, height, width] with values in [-1, 1]."""
    unit = min(height, width)
    time_F = torch.arange(num_frames, dtype=torch.float32)
    background_BC = torch.tensor([[scene.background / 255] * 3 for scene in scenes])
    canvas = background_BC[:, None, :, None, None].expand(-1, num_frames, -1, height, width)
    kind_BN = torch.tensor([[SHAPES.index(scene.shape)] for scene in scenes])
    colour_BNC = torch.tensor([[COLOURS[scene.colour]] for scene in scenes]) / 255
    radius_BN = torch.tensor([[scene.radius] for scene in scenes]) * unit
    centre_BN2 = torch.tensor([[scene.centre] for scene in scenes]) * unit
    step_BN2 = torch.tensor([[DIRECTIONS[scene.direction]] for scene in scenes]) * unit
    step_BN2 = step_BN2 * torch.tensor([scene.speed for scene in scenes])[:, None, None]
    centre_BNF2 = centre_BN2[:, :, None] + step_BN2[:, :, None] * time_F[:, None]
    return _paint(canvas, kind_BN, colour_BNC, radius_BN, centre_BNF2)


def random_clutter(
    generator: torch.Generator, batch: int, num_frames: int, height: int = 64, width: int = 64, num_shapes: int = 4
) -> Tensor:
    """Draw gradient grounds with several moving shapes of any colour: [batch, 3, frames, height, width] in [-1, 1].

    A VAE trained on the demo scenes alone settles on the ground's colour; clutter makes it code colour everywhere.
    """
    unit = min(height, width)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    y_HW, x_HW = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    angle_B = rand(batch) * 2 * torch.pi
    ramp_BHW = angle_B.cos()[:, None, None] * (x_HW - 0.5) + angle_B.sin()[:, None, None] * (y_HW - 0.5) + 0.5
    low_BC, high_BC = rand(batch, 3), rand(batch, 3)
    is_flat_B1 = rand(batch, 1) < 0.35
    high_BC = torch.where(is_flat_B1, low_BC, high_BC)
    ground_BCHW = low_BC[:, :, None, None] + (high_BC - low_BC)[:, :, None, None] * ramp_BHW[:, None].clamp(0, 1)
    canvas = ground_BCHW[:, None].expand(-1, num_frames, -1, -1, -1)

    kind_BN = torch.randint(len(SHAPES), (batch, num_shapes), generator=generator)
    radius_BN = (0.05 + 0.22 * rand(batch, num_shapes)) * unit
    start_BN2 = rand(batch, num_shapes, 2) * torch.tensor([width, height])
    velocity_BN2 = (rand(batch, num_shapes, 2) - 0.5) * 2 * 0.045 * unit
    time_F = torch.arange(num_frames, dtype=torch.float32)
    centre_BNF2 = start_BN2[:, :, None] + velocity_BN2[:, :, None] * time_F[:, None]
    return _paint(canvas, kind_BN, rand(batch, num_shapes, 3), radius_BN, centre_BNF2)


def _paint(canvas_BFCHW: Tensor, kind_BN: Tensor, colour_BNC: Tensor, radius_BN: Tensor, centre_BNF2: Tensor) -> Tensor:
    """Lay shapes over a canvas in [0, 1], later ones on top; lengths in pixels. Returns [B, C, F, H, W] in [-1, 1]."""
    height, width = canvas_BFCHW.shape[-2:]
    y_HW, x_HW = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    for n in range(kind_BN.shape[1]):
        dx = x_HW - centre_BNF2[:, n, :, 0, None, None]
        dy = y_HW - centre_BNF2[:, n, :, 1, None, None]
        distance_BFHW = _signed_distance(kind_BN[:, n], dx, dy, radius_BN[:, n, None, None, None])
        coverage = (0.5 - distance_BFHW).clamp(0, 1)[:, :, None]
        canvas_BFCHW = canvas_BFCHW + coverage * (colour_BNC[:, n, None, :, None, None] - canvas_BFCHW)
    return canvas_BFCHW.transpose(1, 2) * 2 - 1


def _signed_distance(kind_B: Tensor, dx: Tensor, dy: Tensor, radius: Tensor) -> Tensor:
    """Signed distance in pixels to a circle, an axis-aligned square or an upright triangle, all about 2 radii wide."""
    circle = torch.hypot(dx, dy) - radius
    square = torch.maximum(dx.abs(), dy.abs()) - 0.89 * radius
    # Half-planes of an equilateral triangle with inradius r: bottom edge y = r, sides turned by 120 degrees.
    inradius = 0.66 * radius
    local_dy = dy - inradius / 2  # centres the bounding box, not the centroid
    triangle = torch.maximum(local_dy, dx.abs() * (3**0.5 / 2) - local_dy * 0.5) - inradius
    kind = kind_B[:, None, None, None]
    return torch.where(kind == 0, circle, torch.where(kind == 1, square, triangle))


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _choose(options: Sequence[str], generator: torch.Generator) -> str:
    return options[int(torch.randint(len(options), (), generator=generator))]
