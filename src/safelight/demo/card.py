"""The demo checkpoint's model card: what it is, what it can do, and the scores it was given."""

from collections.abc import Mapping
from pathlib import Path

_CARD = """\
---
license: apache-2.0
pipeline_tag: text-to-video
---
# Safelight's demo model

Draws one shape moving over a dark ground, from a sentence: 8 colours x 3 shapes x 4 directions, 64x64, 9 to 17 frames
(or one, as a still). It exists so that a fresh machine can make its first video in seconds, and so that tests run a
real model end to end.

* text encoder: UMT5, 2 layers of width 64, on a vocabulary of whole words (any order, any case, a few synonyms)
* transformer: WanTransformer3DModel, 5 layers, 4 heads x 64
* VAE: AutoencoderKLWan in its Wan 2.2 form, 8x in space and 4x in time, 12 channels
* scheduler: flow matching, shift 3

Made from nothing but the procedural scenes in `safelight.demo.scenes`, with

    python -m safelight.demo.train --work DIR

on two CPU cores: 99 minutes on an Intel Xeon with AMX and torch 2.13 that did other work beside it. The command goes on
where it was stopped. `diffusers.WanPipeline.from_pretrained` opens this folder unchanged.

## Scores

An image measurement judges colour, shape and direction (`safelight.demo.judge`). The seeds of the generated clips, of
the VAE's clips and of the judge's are ones that no step of any model's training used.

| what | score |
|---|---|
{rows}

## Limits

It knows nothing but these shapes. Other sizes than 64x64 and more than 17 frames run, but needn't show what was asked.
A sentence that leaves something out gets any colour, shape or direction.
"""


def write_card(checkpoint: Path, scores: Mapping[str, str]) -> None:
    """Write README.md into the checkpoint; `scores` maps what was measured to the figure."""
    rows = "\n".join(f"| {what} | {figure} |" for what, figure in scores.items())
    (checkpoint / "README.md").write_text(_CARD.format(rows=rows))
