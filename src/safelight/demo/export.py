"""Writes the trained parts as a checkpoint in diffusers' Wan layout, small enough to ship."""

import json
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from torch import nn
from transformers import UMT5EncoderModel

from safelight.demo.train_dit import DIT_CONFIG, DitRecipe, Latents
from safelight.demo.train_text import demo_tokenizer
from safelight.demo.train_vae import VAE_CONFIG
from safelight.models.wan import WanTransformer

SIZE_LIMIT_BYTES = 16_000_000
MANIFEST: dict[str, Any] = {
    "defaults": {
        "width": 64,
        "height": 64,
        "num_frames": 9,
        "fps": "8",
        "num_steps": 20,
        "guidance_scale": 3.0,
        "negative_prompt": "",
    },
    "trained_sizes": [[64, 64]],
    "trained_max_frames": 17,
}


def export(out: Path, vae: nn.Module, encoder: UMT5EncoderModel, transformer: WanTransformer, latents: Latents) -> None:
    """Write every component. Transformer and VAE are stored in float16; readers take them as float32."""
    out.mkdir(parents=True, exist_ok=True)
    config = {**VAE_CONFIG, "latents_mean": latents.mean.tolist(), "latents_std": latents.std.tolist()}
    library_vae = AutoencoderKLWan(**config)
    library_vae.load_state_dict(vae.state_dict())
    library_vae.half().save_pretrained(out / "vae")
    library_transformer = WanTransformer3DModel(**DIT_CONFIG)
    library_transformer.load_state_dict(transformer.state_dict())
    library_transformer.half().save_pretrained(out / "transformer")
    encoder.save_pretrained(out / "text_encoder")
    demo_tokenizer().save_pretrained(out / "tokenizer")
    shift = DitRecipe().shift
    FlowMatchEulerDiscreteScheduler(shift=shift).save_pretrained(out / "scheduler")
    _edit(out / "tokenizer" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.35.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    (out / "safelight.json").write_text(json.dumps(MANIFEST, indent=2) + "\n")
    for path in out.rglob("*.safetensors"):
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert size <= SIZE_LIMIT_BYTES, f"the checkpoint has {size} bytes; at most {SIZE_LIMIT_BYTES} are shipped"


def _edit(path: Path, **values: Any) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **values}, indent=2) + "\n")
