"""Results made up for the tests of files, and what reads them back."""

import dataclasses
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

import safelight
from safelight.naming import plan_paths
from safelight.request import Output, Request, Result

SOURCE = Path(safelight.__file__).parents[1]
PROMPT = "a red circle moving right"
LONG_PROMPTS = {
    "emoji": "🔴 moves ➡️ 👩‍👩‍👧",
    "chinese": "一个红色的圆圈向右移动",
    "ten-thousand": "a very long prompt, 很长 " * 500,
    "ten-thousand-emoji": "🔴" * 10_000,
    "path": "../../etc/passwd",
    "windows": 'C:\\con <>:"|?*.',
    "control": "a\0b\nc\td\x1b[31m\u202e",
    "dots": "...",
    "variation": "\ufe0f\u200d",
    "hindi": "लाल वृत्त",
}


class Plan:
    """Stands for an attention plan: save_result only asks it for JSON."""

    def to_json(self) -> dict[str, Any]:
        return {"machine": {"platform": "cpu"}, "layers": [{"component": "transformer", "backend": "sdpa"}]}


def checkerboard(num_frames: int, height: int, width: int) -> np.ndarray:
    """Black and white pixels that alternate in both directions, and swap in every frame."""
    frame, row, column = np.indices((num_frames, height, width))
    return np.repeat(((frame + row + column) % 2 * 255).astype(np.uint8)[..., None], 3, axis=3)


def result_of(
    *clips: np.ndarray, fps: Fraction = Fraction(16), prompt: str = PROMPT, seed: int = 7, **changes: Any
) -> Result:
    num_frames, height, width, _ = clips[0].shape
    request = Request(
        prompt=prompt,
        width=width,
        height=height,
        num_frames=num_frames,
        fps=fps,
        num_steps=4,
        guidance_scale=3.0,
        seed=seed,
        num_outputs=len(clips),
    )
    outputs = tuple(Output.from_frames(clip, seed=(seed + index) % 2**63, fps=fps) for index, clip in enumerate(clips))
    result = Result(outputs=outputs, plan=Plan(), request=request, model="tiny", timings_s={"denoise": 1.5})  # type: ignore[arg-type]
    return dataclasses.replace(result, **changes)


def still(value: int = 255, size: int = 8) -> np.ndarray:
    return np.full((1, size, size, 3), value, np.uint8)


def clip(num_frames: int = 5, height: int = 16, width: int = 16) -> np.ndarray:
    return checkerboard(num_frames, height, width)


def decoded(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def planned(folder: Path, out: str | None = None, **changes: Any) -> list[Path]:
    arguments = {"prompt": PROMPT, "seed": 7, "num_outputs": 1, "num_frames": 5, "directory": folder, **changes}
    return plan_paths(None if out is None else folder / out, **arguments)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# What a process of its own starts with: the least imports, and results of stills and of a noisy clip of some 130 kB.
PROGRAM = f"""
import os, signal, sys
from fractions import Fraction
from pathlib import Path
sys.path.insert(0, {str(SOURCE)!r})
import numpy as np
from safelight.errors import OutputError, WriteError
from safelight.media import save_result
from safelight.naming import plan_paths
from safelight.request import Output, Request, Result

class Plan:
    def to_json(self):
        return {{}}

def result_of(frames):
    outputs = (Output.from_frames(frames, seed=7, fps=Fraction(16)),)
    request = Request(prompt={PROMPT!r}, seed=7, fps=Fraction(16))
    return Result(outputs=outputs, plan=Plan(), request=request, model="tiny", timings_s={{}})

noise = np.random.default_rng(0).integers(0, 256, (24, 64, 64, 3), np.uint8)
folder = Path(sys.argv[1])
"""
