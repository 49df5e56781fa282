"""Draws the README's picture: `python -m safelight.demo.picture OUT.png` generates four prompts and lays out frames."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from safelight.engine import Engine

PROMPTS = (
    "a red circle moving right",
    "a cyan square moving up",
    "Yellow triangle, falling",
    "moving left: a purple ball",
)
NUM_FRAMES, SHOWN, ZOOM, MARGIN, LINE = 17, 5, 2, 8, 22


def contact_sheet(clips: Sequence[tuple[str, NDArray[np.uint8]]]) -> Image.Image:
    """Rows of evenly spaced frames, each under its prompt; a clip is uint8 [frames, height, width, 3]."""
    height, width = clips[0][1].shape[1:3]
    row = height * ZOOM + LINE + MARGIN
    sheet = Image.new("RGB", (SHOWN * (width * ZOOM + MARGIN) + MARGIN, len(clips) * row + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (prompt, frames) in enumerate(clips):
        draw.text((MARGIN, MARGIN + i * row), prompt, fill="black", font_size=15)
        for column, frame in enumerate(np.linspace(0, len(frames) - 1, SHOWN).round().astype(int)):
            picture = Image.fromarray(frames[frame]).resize((width * ZOOM, height * ZOOM), Image.Resampling.BICUBIC)
            sheet.paste(picture, (MARGIN + column * (width * ZOOM + MARGIN), MARGIN + i * row + LINE))
    return sheet


def main() -> None:
    """Generate the prompts with seed 7 and write the sheet."""
    engine = Engine.from_pretrained()
    clips = [(prompt, engine.generate(prompt, num_frames=NUM_FRAMES, seed=7).outputs[0].frames) for prompt in PROMPTS]
    contact_sheet(clips).save(Path(sys.argv[1]), optimize=True)


if __name__ == "__main__":
    main()
