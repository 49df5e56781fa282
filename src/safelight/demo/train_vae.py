"""Train the demo VAE: single frames first, then clips, reconstructing clutter and demo scenes.

The model is diffusers' AutoencoderKLWan in its Wan 2.2 form (8x in space, 4x in time). Single frames teach colour and
shape cheaply: with one frame a causal kernel sees only its last temporal slice, so the 3-D convolution runs as a 2-D
one. Clips of four latent frames then teach motion; fewer would leave the decoder's steady state untrained.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, WanCausalConv3d, WanRMS_norm, unpatchify
from torch import Tensor, nn
from torch.nn import functional as F

from safelight.demo.scenes import random_clutter, render_scenes, sample_scene
from safelight.demo.training import Progress, Weights, cosine, load_state, save_state, step_generator

VAE_CONFIG: dict[str, Any] = {
    "base_dim": 32,
    "z_dim": 12,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 8,
    "latents_mean": [0.0] * 12,
    "latents_std": [1.0] * 12,
}


@dataclass(frozen=True, kw_only=True)
class VaeRecipe:
    """The VAE's training schedule; `frame_steps` single-frame steps, then `clip_steps` on clips."""

    frame_steps: int = 3000
    frame_batch: int = 32
    clip_steps: int = 3500
    clip_batch: int = 3
    clip_frames: int = 13
    learning_rate: float = 7e-4
    kl_weight: float = 3e-5
    ema_decay: float = 0.998
    seed: int = 1


class Autoencode(nn.Module):
    """Encode, sample the posterior with given noise and decode, without the clamp that would stop gradients."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, clip_BCFHW: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction and the posterior's mean and log variance."""
        mean, log_variance = self.vae._encode(clip_BCFHW).chunk(2, dim=1)
        log_variance = log_variance.clamp(-20, 10)
        latent = mean + noise * torch.exp(0.5 * log_variance)
        return self.decode(latent), mean, log_variance

    def decode(self, latent: Tensor) -> Tensor:
        """The library's chunked decoding, unclamped."""
        vae = self.vae
        vae.clear_cache()
        frames = vae.post_quant_conv(latent).split(1, dim=2)
        chunks = []
        for i, frame in enumerate(frames):
            vae._conv_idx = [0]
            chunks.append(vae.decoder(frame, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=i == 0))
        vae.clear_cache()
        return unpatchify(torch.cat(chunks, dim=2), patch_size=VAE_CONFIG["patch_size"])


@contextmanager
def fast_training_kernels() -> Iterator[None]:
    """Compute the same convolutions and norms in forms that train faster on a CPU, for as long as this is entered."""
    conv_forward, norm_forward = WanCausalConv3d.forward, WanRMS_norm.forward

    def conv(self: WanCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        if cache_x is None and x.shape[2] == 1 and self.kernel_size == (3, 3, 3):
            return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=1).unsqueeze(2)
        return conv_forward(self, x, cache_x)

    def norm(self: WanRMS_norm, x: Tensor) -> Tensor:
        axis = 1 if self.channel_first else -1
        inverse = (x * x).sum(axis, keepdim=True).clamp_min(1e-24).rsqrt()
        return x * inverse * (self.scale * self.gamma)

    WanCausalConv3d.forward, WanRMS_norm.forward = conv, norm
    try:
        yield
    finally:
        WanCausalConv3d.forward, WanRMS_norm.forward = conv_forward, norm_forward


def training_clips(generator: torch.Generator, batch: int, num_frames: int, demo_share: float) -> Tensor:
    """A batch of clips [batch, 3, frames, 64, 64]: clutter, with `demo_share` of demo scenes."""
    num_demo = round(batch * demo_share + float(torch.rand((), generator=generator)) - 0.5)
    parts = []
    if num_demo < batch:
        parts.append(random_clutter(generator, batch - num_demo, num_frames))
    if num_demo > 0:
        parts.append(render_scenes([sample_scene(generator, 17) for _ in range(num_demo)], num_frames))
    return torch.cat(parts)


def train_vae(work: Path, recipe: VaeRecipe, report: Callable[[str], None], *, compile_model: bool) -> AutoencoderKLWan:
    """Train, or go on from `work`, and return the averaged weights' model with latent statistics still unset."""
    torch.manual_seed(recipe.seed)
    vae = AutoencoderKLWan(**VAE_CONFIG)
    with torch.no_grad():
        for module in vae.modules():
            # Earlier temporal slices start at zero: a clip begins as its frames, and motion is learned on top.
            if isinstance(module, WanCausalConv3d) and module.kernel_size == (3, 3, 3):
                module.weight[:, :, :-1] = 0
    weights = Weights(vae, recipe.ema_decay)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    checkpoint = work / "vae.pt"
    step = load_state(checkpoint, model=vae, weights=weights, optimizer=optimizer)
    total = recipe.frame_steps + recipe.clip_steps
    progress = Progress("vae", total, report)
    with fast_training_kernels():
        model: Callable[..., tuple[Tensor, Tensor, Tensor]] = Autoencode(vae)
        if compile_model:
            model = torch.compile(model, dynamic=False)
        while step < total:
            is_clip = step >= recipe.frame_steps
            generator = step_generator(recipe.seed, step)
            demo_share = 0.67 if is_clip else 0.25
            frames = recipe.clip_frames if is_clip else 1
            clip = training_clips(generator, recipe.clip_batch if is_clip else recipe.frame_batch, frames, demo_share)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * cosine(step, total, warmup=200)
            latent_shape = (len(clip), VAE_CONFIG["z_dim"], 1 + (frames - 1) // 4, 8, 8)
            noise = torch.randn(latent_shape, generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.cpu._is_amx_tile_supported()):
                out, mean, log_variance = model(clip, noise)
            out, mean, log_variance = out.float(), mean.float(), log_variance.float()
            mse = F.mse_loss(out, clip)
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
            loss = mse + 0.1 * F.l1_loss(out, clip) + recipe.kl_weight * kl
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            weights.update(vae, step)
            step += 1
            progress.update(step, psnr_db=10 * math.log10(4 / mse.item()), kl=kl.item())
            if step % 250 == 0 or step == total:
                save_state(checkpoint, step, model=vae, weights=weights, optimizer=optimizer)
    weights.copy_to(vae)
    return vae.eval()
