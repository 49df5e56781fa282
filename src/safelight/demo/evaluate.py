"""Scores the demo checkpoint: whether it draws what each of the 96 prompts asks, and how well its VAE keeps clips."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safelight.demo.judge import Judgement, judge
from safelight.demo.prompts import plain_prompt
from safelight.demo.scenes import COLOURS, DIRECTIONS, SHAPES, render_scenes, sample_scene
from safelight.engine import Engine
from safelight.request import Request

HELD_OUT_SEED = 1_000_000_000  # far above every training step's seed (training.step_seed)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Shares from 0 to 1 of clips with the right colour, shape and direction, and with all three."""

    clips: int
    colour: float
    shape: float
    direction: float
    all_right: float

    def __str__(self) -> str:
        shares = f"colour {self.colour:.1%}, shape {self.shape:.1%}, direction {self.direction:.1%}"
        return f"{shares}, all three {self.all_right:.1%} of {self.clips} clips"


def score(asked: Sequence[tuple[str, str, str]], seen: Sequence[Judgement]) -> Score:
    """Compare what was asked, (colour, shape, direction), with what was measured."""
    right = np.array(
        [(s.colour == a[0], s.shape == a[1], s.direction == a[2]) for a, s in zip(asked, seen, strict=True)]
    )
    colour, shape, direction = right.mean(0).tolist()
    return Score(
        clips=len(asked), colour=colour, shape=shape, direction=direction, all_right=float(right.all(1).mean())
    )


def all_attributes() -> list[tuple[str, str, str]]:
    """The 96 combinations of colour, shape and direction."""
    return [(colour, shape, direction) for colour in COLOURS for shape in SHAPES for direction in DIRECTIONS]


def score_judge(num_frames: int = 9, per_prompt: int = 7) -> Score:
    """The judge's own accuracy on rendered clips."""
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    asked = all_attributes() * per_prompt
    scenes = [
        sample_scene(generator, num_frames, colour=colour, shape=shape, direction=direction)
        for colour, shape, direction in asked
    ]
    return score(asked, [judge(frames) for frames in as_frames(render_scenes(scenes, num_frames))])


def score_model(
    engine: Engine,
    *,
    seeds: Sequence[int] = (HELD_OUT_SEED,),
    num_frames: int | None = None,
    wording: Callable[[str, str, str], str] = plain_prompt,
    report: Callable[[str], None] | None = None,
) -> Score:
    """Generate every prompt with every seed and judge the clips."""
    asked: list[tuple[str, str, str]] = []
    seen: list[Judgement] = []
    for seed in seeds:
        for attributes in all_attributes():
            request = Request(prompt=wording(*attributes), seed=seed + len(asked), num_frames=num_frames)
            seen.append(judge(engine.generate(request).outputs[0].frames))
            asked.append(attributes)
            if report is not None and (seen[-1].colour, seen[-1].shape, seen[-1].direction) != attributes:
                report(f"asked {attributes}, seed {request.seed}: saw {seen[-1]}")
    return score(asked, seen)


def score_vae(folder: Path, num_frames: int = 17, clips: int = 32) -> float:
    """Mean PSNR in dB of held-out demo clips through the checkpoint's encoder and decoder."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(folder / "vae").eval()
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    scenes = [sample_scene(generator, num_frames) for _ in range(clips)]
    values = []
    with torch.no_grad():
        for start in range(0, clips, 8):
            clip = render_scenes(scenes[start : start + 8], num_frames)
            out = vae.decode(vae.encode(clip).latent_dist.mean).sample
            values += [10 * math.log10(4 / float(mse)) for mse in (out - clip).square().mean((1, 2, 3, 4))]
    return sum(values) / len(values)


def as_frames(clips_BCFHW: Tensor) -> NDArray[np.uint8]:
    """Clips in [-1, 1] as uint8 [batch, frames, height, width, 3]."""
    return ((clips_BCFHW + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()
