"""Small Wan models with random weights: diffusers' class, ours with the same weights, and whole checkpoints."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from safelight.attention.backends import sdpa
from safelight.attention.layer import Attention
from safelight.attention.plan import build_plan
from safelight.attention.runtime import bind, load_plan
from safelight.attention.select import declared_backends
from safelight.models.wan import TextContext, WanTransformer
from safelight.models.wan_config import WanConfig
from safelight.pipelines.wan.pipeline import WanPipeline
from safelight.planning import DEMO, check_model
from safelight.platforms import probe_machine

TINY: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 40,
    "num_layers": 2,
    "cross_attn_norm": True,
}


def relative_error(found: Tensor, reference: Tensor) -> float:
    """The largest error, in units of the largest reference value."""
    assert found.shape == reference.shape
    assert bool(torch.isfinite(reference).all())
    return float((found.float() - reference.float()).abs().max() / reference.float().abs().max())


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 7) -> None:
    """Weights that make every part count: no norm is one, no bias is nearly zero, no table is small."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("gamma") or (value.ndim == 1 and name.endswith("weight")):
            value.copy_(1 + 0.2 * noise)
        elif name.endswith("bias"):
            value.copy_(0.2 * noise)
        elif name.endswith("scale_shift_table"):
            value.copy_(0.4 * noise)
        elif value.ndim == 2 and name.endswith(("shared.weight", "embed_tokens.weight")):
            value.copy_(noise)
        else:
            value.copy_(noise / value[0].numel() ** 0.5)


def reference_transformer(seed: int = 7, **changes: Any) -> Any:
    """diffusers' transformer, tiny, with random weights."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(**TINY | changes).eval().requires_grad_(False)
    randomise(model, seed)
    return model


def native_transformer(reference: Any, *, merges_zero_rows: bool = True, fused: bool = False) -> WanTransformer:
    """Our transformer with the reference's weights, and sdpa bound."""
    model = WanTransformer(WanConfig.from_json(dict(reference.config))).eval()
    model.load_state_dict(reference.state_dict(), strict=True)
    model.requires_grad_(False)
    bind_sdpa(model, takes_bias=merges_zero_rows)
    if fused:
        model.fuse()
    return model


def bind_sdpa(model: nn.Module, *, takes_bias: bool = True) -> None:
    """Give every attention layer its kernel; without its declaration, no layer knows that it takes a bias."""
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.kernel = sdpa.load(layer.requirements)
            layer.backend = sdpa.BACKEND if takes_bias else None


def random_inputs(
    config: Any, grid: tuple[int, int, int], num_tokens: Sequence[int], length: int, seed: int = 3
) -> tuple[Tensor, Tensor]:
    """Latents for a token grid, and text states [batch, length, text_dim] that are zero past each row's tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = [tokens * patch for tokens, patch in zip(grid, config.patch_size, strict=True)]
    latents = torch.randn(len(num_tokens), config.in_channels, *size, generator=generator)
    states = torch.randn(len(num_tokens), length, config.text_dim, generator=generator)
    states[torch.arange(length) >= torch.tensor(num_tokens)[:, None]] = 0
    return latents, states


def velocity(model: WanTransformer, latents: Tensor, timesteps: Tensor, text: TextContext) -> Tensor:
    """One forward pass in which every row has its own timestep."""
    rotary = model.rotary(model.grid(latents))
    out: Tensor = model(latents, model.row_modulation(timesteps), text, rotary)
    return out


def write_checkpoint(
    folder: Path, *, scheduler: Any = None, seed: int = 7, boundary_ratio: float | None = None, **transformer: Any
) -> Path:
    """A whole Wan checkpoint of random weights, as diffusers and transformers write it; Wan 2.1's form of VAE.

    `scheduler` is diffusers' object, Euler's by default. The tokenizer is the demo's. With a `boundary_ratio` there are
    two transformers, of unequal weights and sizes.
    """
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
    from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

    text = {"vocab_size": 120, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    encoder = UMT5EncoderModel(UMT5Config(**text, feed_forward_proj="gated-gelu"))
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.5, -1.0, 0.0, 2.0],
        latents_std=[1.0, 2.0, 3.0, 0.5],
        scale_factor_spatial=4,
    )
    randomise(encoder, seed)
    randomise(vae, seed)
    with torch.no_grad():
        # Keeps most pixels inside [-1, 1], where nothing is clamped.
        vae.decoder.conv_out.weight.mul_(0.3)
    pipeline = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(DEMO / "tokenizer"),
        text_encoder=encoder.eval(),
        vae=vae.eval(),
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=reference_transformer(seed, **{"text_dim": 16, **transformer}),
        transformer_2=None if boundary_ratio is None else reference_transformer(seed + 1, num_layers=3, ffn_dim=24),
        boundary_ratio=boundary_ratio,
    )
    pipeline.save_pretrained(folder)
    # A large model's defaults would make every run a long one.
    defaults = {"width": 32, "height": 16, "num_frames": 5, "num_steps": 2, "guidance_scale": 5.0, "fps": "8"}
    (folder / "safelight.json").write_text(json.dumps({"defaults": defaults}))
    return folder


def copy_checkpoint(source: Path, folder: Path) -> Path:
    """A copy whose files can be spoilt."""
    return Path(shutil.copytree(source, folder))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; None takes a key away."""
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def edit_weights(path: Path, change: Any) -> None:
    """Have `change` alter a safetensors file's tensors, given as a dict."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def open_pipeline(folder: Path | None, dtype: str = "float32") -> WanPipeline:
    """A checkpoint's pipeline on the CPU, with kernels bound; None is the demo."""
    checkpoint = check_model(folder)
    pipeline = checkpoint.load(dtype, "cpu", lambda step, num_steps: None)
    assert isinstance(pipeline, WanPipeline)
    backends = declared_backends()
    groups = checkpoint.layer_groups(dtype)
    loaded = load_plan(lambda machine: build_plan(groups, machine, [], backends), probe_machine("cpu"), backends)
    for component, module in pipeline.modules.items():
        bind(component, module, loaded)
    return pipeline


def draw_config(seed: int) -> dict[str, Any]:
    """A random tiny transformer's configuration."""
    draw = random.Random(seed)
    return TINY | {
        "patch_size": draw.choice([[1, 2, 2], [1, 1, 1], [1, 2, 1], [2, 2, 2]]),
        "num_attention_heads": draw.choice([1, 2, 3, 5, 8]),
        "attention_head_dim": draw.choice([6, 8, 12, 16, 24, 64]),
        "in_channels": draw.randint(1, 6),
        "out_channels": draw.choice([None, 1, 3, 8]),
        "text_dim": draw.choice([4, 10, 33]),
        "freq_dim": draw.choice([2, 32, 256]),
        "ffn_dim": draw.choice([1, 30, 96]),
        "num_layers": draw.randint(1, 4),
        "cross_attn_norm": draw.choice([True, False]),
        "eps": draw.choice([1e-6, 1e-5, 1e-3]),
    }
