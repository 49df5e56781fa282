"""Train the demo's text encoder to tell colour, shape and direction, and build its tokenizer.

A small UMT5 learns from wordings of known scenes; the transformer then finds their meaning laid out in its states. The
classification heads are thrown away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from safelight.demo.prompts import sample_prompt, vocabulary
from safelight.demo.scenes import COLOURS, DIRECTIONS, SHAPES
from safelight.demo.training import Progress, cosine, load_state, save_state, step_generator

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
MAX_TOKENS = 512
ATTRIBUTES: tuple[tuple[str, ...], ...] = (tuple(COLOURS), SHAPES, tuple(DIRECTIONS))


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """The text encoder's schedule; `unsaid` is the chance that a prompt leaves an attribute out."""

    steps: int = 1200
    batch: int = 128
    learning_rate: float = 2e-3
    unsaid: float = 0.15
    seed: int = 2


def demo_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words, lower-cased, punctuation dropped; anything unknown is one token; </s> ends a prompt."""
    words = [PAD, END, UNKNOWN, *vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("removed")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=MAX_TOKENS
    )


def text_config(vocabulary_size: int) -> UMT5Config:
    """The demo's UMT5: two layers of width 64."""
    return UMT5Config(
        vocab_size=vocabulary_size,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [batch, longest]."""
    batch = tokenizer(list(prompts), padding=True, return_tensors="pt")
    return batch.input_ids, batch.attention_mask


def train_text(work: Path, recipe: TextRecipe, report: Callable[[str], None]) -> UMT5EncoderModel:
    """Train, or go on from `work`, and return the encoder."""
    torch.manual_seed(recipe.seed)
    tokenizer = demo_tokenizer()
    encoder = UMT5EncoderModel(text_config(len(tokenizer)))
    heads = nn.ModuleList(nn.Linear(encoder.config.d_model, len(options) + 1) for options in ATTRIBUTES)
    model = nn.ModuleDict({"encoder": encoder, "heads": heads})
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    checkpoint = work / "text.pt"
    step = load_state(checkpoint, model=model, optimizer=optimizer)
    progress = Progress("text", recipe.steps, report)
    while step < recipe.steps:
        generator = step_generator(recipe.seed, step)
        prompts, labels_BA = _labelled_prompts(recipe, generator)
        ids, mask = tokenize(tokenizer, prompts)
        states = encoder(ids, mask).last_hidden_state
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = [head(pooled) for head in heads]
        loss = torch.stack([F.cross_entropy(x, labels_BA[:, a]) for a, x in enumerate(logits)]).sum()
        right = torch.stack([x.argmax(-1) == labels_BA[:, a] for a, x in enumerate(logits)]).all(0).float().mean()
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * cosine(step, recipe.steps, warmup=50)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        progress.update(step, loss=loss.item(), all_right=right.item())
        if step % 400 == 0 or step == recipe.steps:
            save_state(checkpoint, step, model=model, optimizer=optimizer)
    return encoder.eval().requires_grad_(False)


def _labelled_prompts(recipe: TextRecipe, generator: torch.Generator) -> tuple[list[str], Tensor]:
    """Prompts and the index of each attribute; the index past the last means unsaid."""
    prompts, labels = [], []
    for _ in range(recipe.batch):
        chosen: list[int] = []
        for options in ATTRIBUTES:
            is_unsaid = float(torch.rand((), generator=generator)) < recipe.unsaid
            chosen.append(len(options) if is_unsaid else int(torch.randint(len(options), (), generator=generator)))
        said = [None if i == len(options) else options[i] for i, options in zip(chosen, ATTRIBUTES, strict=True)]
        prompts.append(sample_prompt(said[0], said[1], said[2], generator))
        labels.append(chosen)
    return prompts, torch.tensor(labels)
