"""Makes the demo checkpoint from nothing: `python -m safelight.demo.train --work DIR [--out DIR]`.

Stages: text encoder, VAE, encoded scenes, transformer, export, scores. Each keeps its state in the work directory and
goes on from there when the command is given again.
"""

import argparse
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from safelight.demo.card import write_card
from safelight.demo.evaluate import HELD_OUT_SEED, score_judge, score_model, score_vae
from safelight.demo.export import export
from safelight.demo.prompts import sample_prompt
from safelight.demo.train_dit import DitRecipe, encode_scenes, train_dit
from safelight.demo.train_text import TextRecipe, train_text
from safelight.demo.train_vae import VaeRecipe, train_vae
from safelight.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The schedules of the three models that are trained."""

    text: TextRecipe = field(default_factory=TextRecipe)
    vae: VaeRecipe = field(default_factory=VaeRecipe)
    dit: DitRecipe = field(default_factory=DitRecipe)


def main() -> None:
    """Make the checkpoint, or go on with it, and score it."""
    parser = argparse.ArgumentParser(prog="python -m safelight.demo.train", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where the stages keep their state")
    parser.add_argument("--out", type=Path, help="where the checkpoint goes (default: WORK/checkpoint)")
    parser.add_argument("--no-compile", action="store_true", help="don't compile the models (needs g++)")
    arguments = parser.parse_args()
    work: Path = arguments.work
    started_s = time.monotonic()

    def report(line: str) -> None:
        print(f"{(time.monotonic() - started_s) / 60:6.1f} min  {line}", flush=True)

    report(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    can_compile = not arguments.no_compile and shutil.which("g++") is not None
    out: Path = arguments.out or work / "checkpoint"
    make_checkpoint(work, out, Recipe(), report, compile_models=can_compile)
    write_scores(work, out, report)


def make_checkpoint(
    work: Path, out: Path, recipe: Recipe, report: Callable[[str], None], *, compile_models: bool
) -> None:
    """Run every stage that isn't done yet in `work`, and write the checkpoint to `out`."""
    work.mkdir(parents=True, exist_ok=True)
    encoder = train_text(work, recipe.text, report)
    vae = train_vae(work, recipe.vae, report, compile_model=compile_models)
    latents = encode_scenes(work, vae, recipe.dit, report)
    transformer = train_dit(work, latents, encoder, recipe.dit, report, compile_model=compile_models)
    export(out, vae, encoder, transformer, latents)
    report(f"checkpoint in {out}")


def write_scores(work: Path, checkpoint: Path, report: Callable[[str], None]) -> None:
    """Score the checkpoint on seeds that no training step used; write the card and `work`'s scores.json."""
    engine = Engine.from_pretrained(checkpoint)
    seeds = (HELD_OUT_SEED, 2 * HELD_OUT_SEED)
    scores = {
        "VAE, PSNR of held-out clips of 17 frames": f"{score_vae(checkpoint):.1f} dB",
        "the judge itself, on rendered clips": str(score_judge()),
        "96 prompts x 2 seeds, 9 frames": str(score_model(engine, seeds=seeds, report=report)),
        "96 prompts x 2 seeds, 17 frames": str(score_model(engine, seeds=seeds, num_frames=17, report=report)),
        "the same in other words, 9 frames": str(score_model(engine, seeds=seeds, wording=other_words, report=report)),
    }
    temporary = work / "scores.tmp"
    temporary.write_text(json.dumps(scores, indent=2) + "\n")
    os.replace(temporary, work / "scores.json")
    write_card(checkpoint, scores)
    for what, figure in scores.items():
        report(f"{what}: {figure}")


def other_words(colour: str, shape: str, direction: str) -> str:
    """The scene in a wording that depends on it alone: synonyms, fillers, another order."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{colour} {shape} {direction}".encode()))
    return sample_prompt(colour, shape, direction, generator, plain_share=0.0)


if __name__ == "__main__":
    main()
