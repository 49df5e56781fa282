"""Makes the demo checkpoint from nothing: `python -m safelight.demo.train --work DIR [--out DIR]`.

Stages: text encoder, VAE, encoded scenes, transformer, export, scores. Each keeps its state in the work directory and
goes on from there when the command is given again.
"""

import argparse
import json
import shutil
import time
import zlib
from pathlib import Path

import torch

from safelight.demo.card import write_card
from safelight.demo.evaluate import score_judge, score_model, score_vae
from safelight.demo.export import export
from safelight.demo.prompts import sample_prompt
from safelight.demo.train_dit import DitRecipe, encode_scenes, train_dit
from safelight.demo.train_text import TextRecipe, train_text
from safelight.demo.train_vae import VaeRecipe, train_vae
from safelight.engine import Engine


def main() -> None:
    """Run every stage that isn't done yet."""
    parser = argparse.ArgumentParser(prog="python -m safelight.demo.train", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where the stages keep their state")
    parser.add_argument("--out", type=Path, help="where the checkpoint goes (default: WORK/checkpoint)")
    parser.add_argument("--no-compile", action="store_true", help="don't compile the models (needs g++)")
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()

    def report(line: str) -> None:
        print(f"{(time.monotonic() - started_s) / 60:6.1f} min  {line}", flush=True)

    report(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    encoder = train_text(work, TextRecipe(), report)
    can_compile = not arguments.no_compile and shutil.which("g++") is not None
    vae = train_vae(work, VaeRecipe(), report, compile_model=can_compile)
    latents = encode_scenes(work, vae, DitRecipe(), report)
    transformer = train_dit(work, latents, encoder, DitRecipe(), report, compile_model=can_compile)
    out: Path = arguments.out or work / "checkpoint"
    export(out, vae, encoder, transformer, latents)
    report(f"checkpoint in {out}")
    engine = Engine.from_pretrained(out)
    seeds = (1_000_000, 2_000_000)
    scores = {
        "VAE, PSNR of held-out clips of 17 frames": f"{score_vae(out):.1f} dB",
        "the judge itself, on rendered clips": str(score_judge()),
        "96 prompts x 2 seeds, 9 frames": str(score_model(engine, seeds=seeds, report=report)),
        "96 prompts x 2 seeds, 17 frames": str(score_model(engine, seeds=seeds, num_frames=17, report=report)),
        "the same in other words, 9 frames": str(score_model(engine, seeds=seeds, wording=other_words, report=report)),
    }
    (work / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    write_card(out, scores)
    for what, figure in scores.items():
        report(f"{what}: {figure}")


def other_words(colour: str, shape: str, direction: str) -> str:
    """The scene in a wording that depends on it alone: synonyms, fillers, another order."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{colour} {shape} {direction}".encode()))
    return sample_prompt(colour, shape, direction, generator, plain_share=0.0)


if __name__ == "__main__":
    main()
