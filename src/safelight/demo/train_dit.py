"""Train the demo's transformer by flow matching on encoded scenes (Lipman et al. 2023)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import UMT5EncoderModel

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout
from safelight.attention.layer import Attention
from safelight.attention.requirements import AttentionRequirements
from safelight.demo.prompts import sample_prompt
from safelight.demo.scenes import Scene, render_scenes, sample_scene
from safelight.demo.train_text import MAX_TOKENS, demo_tokenizer, tokenize
from safelight.demo.training import Progress, Weights, cosine, load_state, save_state, save_whole, step_generator
from safelight.models.wan import TextContext, WanCrossAttention, WanTransformer
from safelight.models.wan_config import WanConfig

DIT_CONFIG = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": 12,
    "out_channels": 12,
    "text_dim": 64,
    "freq_dim": 256,
    "ffn_dim": 640,
    "num_layers": 5,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
    "pos_embed_seq_len": None,
}
# A causal VAE's first latent frames are those of the shorter clip, so one encoded clip of 17 frames serves all lengths.
CLIP_FRAMES = 17
LATENT_FRAMES_SHARES = {1: 0.1, 3: 0.52, 5: 0.38}
TEXT_ROWS = 20  # every batch is padded to this many text rows, so that compiled shapes stay the same


@dataclass(frozen=True, kw_only=True)
class DitRecipe:
    """The transformer's schedule."""

    clips: int = 6_000
    steps: int = 4000
    batch: int = 64
    learning_rate: float = 1e-3
    shift: float = 3.0
    drop_prompt: float = 0.1
    drop_attribute: float = 0.08
    ema_decay: float = 0.999
    seed: int = 3


@dataclass(frozen=True)
class Latents:
    """Encoded scenes: normalised latents [clips, 12, 5, 8, 8], what they show, and the statistics per channel."""

    clips: Tensor
    scenes: list[Scene]
    mean: Tensor
    std: Tensor


@torch.no_grad()
def encode_scenes(work: Path, vae: AutoencoderKLWan, recipe: DitRecipe, report: Callable[[str], None]) -> Latents:
    """Encode the training scenes, or read them back from `work`."""
    generator = step_generator(recipe.seed, -1)
    scenes = [sample_scene(generator, CLIP_FRAMES) for _ in range(recipe.clips)]
    path = work / "latents.pt"
    if path.exists():
        clips = torch.load(path, weights_only=True)
    else:
        progress = Progress("latents", len(scenes), report, every=1000)
        parts = []
        for start in range(0, len(scenes), 20):
            pixels = render_scenes(scenes[start : start + 20], CLIP_FRAMES)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.cpu._is_amx_tile_supported()):
                parts.append(vae.encode(pixels).latent_dist.mean.float())
            progress.update(min(start + 20, len(scenes)))
        clips = torch.cat(parts)
        save_whole(path, clips)
    mean, std = clips.mean((0, 2, 3, 4)), clips.std((0, 2, 3, 4))
    normalised = (clips - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1)
    return Latents(normalised, scenes, mean, std)


def small_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Attention as two products: for a hundred tokens its backward pass is far quicker than a fused kernel's."""
    assert not causal, "the demo's layers look both ways"
    scores_BHST = torch.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = (scores_BHST if mask is None else scores_BHST + mask).softmax(-1)
    return torch.einsum("bhst,bthd->bshd", weights.to(v.dtype), v)


def _load_small_attention(requirements: AttentionRequirements) -> AttentionFn:
    return small_attention


# Not among the declared backends: it serves this file's layers, which are small, and nothing selects it.
SMALL_ATTENTION = AttentionBackend(
    name="demo_training",
    summary="two matrix products and a softmax, for training on short sequences",
    load=_load_small_attention,
    dtypes=frozenset({"bfloat16", "float32"}),
    masks=frozenset({"none", "bias"}),
    grouped_query=False,
    causal=False,
)


def new_transformer() -> WanTransformer:
    """The demo's transformer with its starting weights."""
    model = WanTransformer(WanConfig.from_json(DIT_CONFIG))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention):
            module.backend, module.kernel = SMALL_ATTENTION, small_attention
    nn.init.zeros_(model.proj_out.weight)
    for module in model.modules():
        if not isinstance(module, WanCrossAttention):
            continue
        # 500 empty text rows outweigh ten words at first. A bias that queries share and empty keys oppose quiets them.
        direction = torch.randn(model.config.dim)
        module.to_q.bias.data.copy_(direction)
        module.to_k.bias.data.copy_(-0.02 * direction)
    return model


def train_dit(
    work: Path,
    latents: Latents,
    encoder: UMT5EncoderModel,
    recipe: DitRecipe,
    report: Callable[[str], None],
    *,
    compile_model: bool,
) -> WanTransformer:
    """Train, or go on from `work`, and return the averaged weights."""
    torch.manual_seed(recipe.seed)
    model = new_transformer()
    weights = Weights(model, recipe.ema_decay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    checkpoint = work / "dit.pt"
    step = load_state(checkpoint, model=model, weights=weights, optimizer=optimizer)
    tokenizer = demo_tokenizer()
    progress = Progress("dit", recipe.steps, report)
    compiled: Callable[..., Tensor] = torch.compile(model, dynamic=False) if compile_model else model
    lengths, shares = list(LATENT_FRAMES_SHARES), torch.tensor(list(LATENT_FRAMES_SHARES.values()))
    while step < recipe.steps:
        generator = step_generator(recipe.seed, step)
        frames = lengths[int(torch.multinomial(shares, 1, generator=generator))]
        chosen = torch.randint(len(latents.clips), (recipe.batch,), generator=generator)
        data = latents.clips[chosen, :, :frames]
        prompts = [training_prompt(latents.scenes[int(i)], recipe, frames > 1, generator) for i in chosen]
        ids, mask = tokenize(tokenizer, prompts)
        states = encoder(ids, mask).last_hidden_state * mask[..., None]
        noise = torch.randn(data.shape, generator=generator)
        u = (torch.arange(recipe.batch) + torch.rand(recipe.batch, generator=generator)) / recipe.batch
        sigma_B = recipe.shift * u / (1 + (recipe.shift - 1) * u)
        sigma_BCFHW = sigma_B[:, None, None, None, None]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.cpu._is_amx_tile_supported()):
            text = _padded(model.text_context(states, mask.sum(1).tolist(), MAX_TOKENS))
            noisy = (1 - sigma_BCFHW) * data + sigma_BCFHW * noise
            forward = compiled if frames > 1 else model
            velocity = forward(noisy, model.row_modulation(sigma_B * 1000), text, model.rotary(model.grid(data)))
        loss = F.mse_loss(velocity.float(), noise - data)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * cosine(step, recipe.steps, warmup=200)
        optimizer.step()
        weights.update(model, step)
        step += 1
        progress.update(step, loss=loss.item())
        if step % 250 == 0 or step == recipe.steps:
            save_state(checkpoint, step, model=model, weights=weights, optimizer=optimizer)
    weights.copy_to(model)
    return model.eval().requires_grad_(False)


def _padded(text: TextContext) -> TextContext:
    """The text with rows that nothing attends to, up to TEXT_ROWS."""
    assert text.bias is not None
    missing = TEXT_ROWS - text.bias.shape[-1]
    pad = (0, 0, 0, 0, 0, missing)
    return TextContext(
        keys=tuple(F.pad(keys, pad) for keys in text.keys),
        values=tuple(F.pad(values, pad) for values in text.values),
        bias=F.pad(text.bias, (0, missing), value=-torch.inf),
    )


def training_prompt(scene: Scene, recipe: DitRecipe, moves: bool, generator: torch.Generator) -> str:
    """A wording of the scene; sometimes one attribute or everything is left out."""

    def roll() -> float:
        return float(torch.rand((), generator=generator))

    if roll() < recipe.drop_prompt:
        return ""
    colour = None if roll() < recipe.drop_attribute else scene.colour
    shape = None if roll() < recipe.drop_attribute else scene.shape
    # A still shows no direction: there the word is mostly left out, and when it is said it changes little.
    unsaid_direction = recipe.drop_attribute if moves else 0.6
    direction = None if roll() < unsaid_direction else scene.direction
    return sample_prompt(colour, shape, direction, generator)
