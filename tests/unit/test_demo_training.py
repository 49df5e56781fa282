"""The demo's training program: it goes on where it was stopped, and is scored on seeds it didn't train on."""

import json

import pytest
import torch
from safetensors.torch import load_file

from safelight.attention.reference import reference_attention
from safelight.attention.requirements import AttentionRequirements
from safelight.demo import train as training_program
from safelight.demo.evaluate import HELD_OUT_SEED
from safelight.demo.train import Recipe, make_checkpoint
from safelight.demo.train_dit import SMALL_ATTENTION, DitRecipe
from safelight.demo.train_text import TextRecipe
from safelight.demo.train_vae import VaeRecipe
from safelight.demo.training import step_seed

# Mixed precision norms bfloat16 rows with float32 weights; torch says that it has no fused kernel for this.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")

TINY = Recipe(
    text=TextRecipe(steps=2, batch=4),
    vae=VaeRecipe(frame_steps=1, frame_batch=2, clip_steps=1, clip_batch=1, clip_frames=5),
    dit=DitRecipe(clips=4, steps=2, batch=4),
)


class Stopped(Exception):
    """Stands for the kill of a run."""


def stop_at(words: str):
    def report(line: str) -> None:
        if line.startswith(words):
            raise Stopped

    return report


def weights_of(checkpoint) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.parent.name}.{name}": value for file in files for name, value in load_file(file).items()}


@pytest.mark.slow
def test_a_run_that_was_stopped_in_every_stage_makes_the_same_checkpoint(tmp_path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    make_checkpoint(whole, whole / "checkpoint", TINY, lambda line: None, compile_models=False)
    for stage in ("text", "vae", "latents", "dit"):
        with pytest.raises(Stopped):
            make_checkpoint(stopped, stopped / "checkpoint", TINY, stop_at(stage), compile_models=False)
    make_checkpoint(stopped, stopped / "checkpoint", TINY, lambda line: None, compile_models=False)
    one, other = weights_of(whole / "checkpoint"), weights_of(stopped / "checkpoint")
    assert {name.split(".")[0] for name in one} == {"text_encoder", "transformer", "vae"}
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.slow
def test_a_stage_that_is_done_isnt_trained_again(tmp_path) -> None:
    make_checkpoint(tmp_path, tmp_path / "checkpoint", TINY, lambda line: None, compile_models=False)
    lines: list[str] = []
    make_checkpoint(tmp_path, tmp_path / "checkpoint", TINY, lines.append, compile_models=False)
    assert lines == [f"checkpoint in {tmp_path / 'checkpoint'}"]


@pytest.mark.slow
def test_the_scores_go_to_the_card_and_to_a_file(tmp_path, monkeypatch) -> None:
    make_checkpoint(tmp_path, tmp_path / "checkpoint", TINY, lambda line: None, compile_models=False)
    asked = []
    monkeypatch.setattr(training_program, "score_model", lambda engine, **how: asked.append(how["seeds"]) or "a score")
    training_program.write_scores(tmp_path, tmp_path / "checkpoint", lambda line: None)
    scores = json.loads((tmp_path / "scores.json").read_text())
    card = (tmp_path / "checkpoint" / "README.md").read_text()
    assert [what for what, figure in scores.items() if f"| {what} | {figure} |" not in card] == []
    assert scores["the judge itself, on rendered clips"].startswith("colour 100.0%, shape 100.0%, direction 100.0%")
    assert {seed for seeds in asked for seed in seeds} == {HELD_OUT_SEED, 2 * HELD_OUT_SEED}


def test_no_training_step_has_a_seed_of_the_evaluation() -> None:
    recipe = Recipe()
    last_steps = [
        (recipe.text.seed, recipe.text.steps),
        (recipe.vae.seed, recipe.vae.frame_steps + recipe.vae.clip_steps),
        (recipe.dit.seed, recipe.dit.steps),
    ]
    assert max(step_seed(seed, step) for seed, step in last_steps) < HELD_OUT_SEED


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_training_kernel_is_attention(scale) -> None:
    requirements = AttentionRequirements(head_dim=8, dtype="float32", num_heads=2, num_kv_heads=2, mask="bias")
    assert SMALL_ATTENTION.load is not None
    kernel = SMALL_ATTENTION.load(requirements)
    q, k, v = (torch.randn(2, rows, 2, 8) for rows in (5, 7, 7))
    bias = torch.randn(2, 1, 1, 7)
    expected = reference_attention(q, k, v, scale=scale, mask=bias)[0]
    assert (kernel(q, k, v, scale=scale, mask=bias) - expected).abs().max() <= 1e-6
