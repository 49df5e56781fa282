"""The decoder of Wan's video VAE, both forms (Wan 2.1, and Wan 2.2's residual one), in diffusers' checkpoint layout.

Reference: diffusers' AutoencoderKLWan; Wan Team 2025, "Wan: Open and Advanced Large-Scale Video Generative Models",
section 4.1. The encoder isn't here: text-to-video only decodes.

Axes: B batch, F frames, C channels, H height, W width; N = F x B, frame-major, so that a step in time is a step of B
rows and any run of frames is a view. Everything inside is [N, C, H, W] in channels_last memory: to most layers a clip
is a batch of images. Time is seen by the causal convolutions, and by upsampling that doubles the frames.

A clip is decoded in chunks of latent frames, as many as fit a budget. The causal convolutions carry their last input
frames from chunk to chunk, which makes the result that of one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from safelight.attention.layer import Attention
from safelight.attention.requirements import AttentionRequirements
from safelight.models.wan_vae_config import WanVaeConfig

# The checkpoint's other half: keys that a decoder has no use for.
ENCODER_PREFIXES = ("encoder.", "quant_conv.")

HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class Carry:
    """What one decoding carries from chunk to chunk: each causal convolution's last input frames [N, C, H, W]."""

    batch: int
    is_first: bool = True
    is_last: bool = False
    tails: dict["CausalConv3d", Tensor] = field(default_factory=dict)

    @property
    def num_first(self) -> int:
        """How many of the chunk's leading rows are the clip's first frame."""
        return self.batch if self.is_first else 0


class WanVaeDecoder(nn.Module):
    """Decodes latents into frames. State-dict keys and shapes are the reference's but for ENCODER_PREFIXES."""

    def __init__(self, config: WanVaeConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.post_quant_conv = CausalConv3d(config.z_dim, config.z_dim, (1, 1, 1))
        self.decoder = Decoder(config, config.attention_requirements(str(dtype).removeprefix("torch.")))
        self.to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the convolutions."""
        return self.post_quant_conv.weight.dtype

    def denormalise(self, latents_BCFHW: Tensor) -> Tensor:
        """Turn the diffusion model's latents into the VAE's own: times the latents' deviation, plus their mean."""
        mean, std = (
            latents_BCFHW.new_tensor(values).view(-1, 1, 1, 1)
            for values in (self.config.latents_mean, self.config.latents_std)
        )
        return latents_BCFHW * std + mean

    @torch.no_grad()
    def decode(
        self,
        latents_BCFHW: Tensor,
        *,
        max_chunk_pixels: int = 2**20,
        on_chunk: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Decode denormalised latents to frames [batch, channels, frames, height, width] in [-1, 1].

        N latent frames give 1 + (N - 1) * temporal_factor frames. A chunk has at most `max_chunk_pixels` pixels of
        output, but at least one latent frame: it bounds the memory and doesn't change the result. `on_chunk` is told
        how many chunks are done, and of how many.
        """
        config = self.config
        batch, _, num_latents, rows, columns = latents_BCFHW.shape
        height, width = rows * config.spatial_factor, columns * config.spatial_factor
        num_frames = 1 + (num_latents - 1) * config.temporal_factor
        chunk_length = max(1, max_chunk_pixels // (batch * config.temporal_factor * height * width))

        latents_FBCHW = latents_BCFHW.to(self.dtype).permute(2, 0, 1, 3, 4)
        chunks = latents_FBCHW.split(chunk_length)
        frames_BCFHW = latents_FBCHW.new_empty(batch, config.image_channels, num_frames, height, width)
        carry = Carry(batch)
        begin = 0
        for i, chunk_FBCHW in enumerate(chunks, start=1):
            carry.is_last = i == len(chunks)
            x = chunk_FBCHW.flatten(0, 1).contiguous(memory_format=torch.channels_last)
            x = self.post_quant_conv(x, carry)
            x = self.decoder(x, carry)
            end = begin + len(x) // batch
            unpatchify_into(frames_BCFHW[:, :, begin:end], x, config.patch)
            carry.is_first = False
            begin = end
            if on_chunk is not None:
                on_chunk(i, len(chunks))
        return frames_BCFHW.clamp_(-1, 1)


class Decoder(nn.Module):
    """From latent frames to patches of pixels."""

    def __init__(self, config: WanVaeConfig, attention: AttentionRequirements) -> None:
        super().__init__()
        first, last = config.decoder_stages[0][0], config.decoder_stages[-1][1]
        up_block: type[UpBlock | ResidualUpBlock] = ResidualUpBlock if config.is_residual else UpBlock
        doubles_frames = (*config.temporal_upsample, None)  # the last stage doesn't upsample
        self.conv_in = CausalConv3d(config.z_dim, first, (3, 3, 3))
        self.mid_block = MidBlock(first, attention)
        self.up_blocks = nn.ModuleList(
            up_block(dim_in, dim_out, config.num_res_blocks, doubles)
            for (dim_in, dim_out), doubles in zip(config.decoder_stages, doubles_frames, strict=True)
        )
        self.norm_out = RMSNorm(last, 3)
        self.conv_out = CausalConv3d(last, config.out_channels, (3, 3, 3))

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Decode one chunk."""
        x = self.conv_in(x, carry)
        x = self.mid_block(x, carry)
        for up_block in self.up_blocks:
            x = up_block(x, carry)
        x = F.silu(self.norm_out(x, in_place=True), inplace=True)
        return self.conv_out(x, carry)


class MidBlock(nn.Module):
    """Residual blocks around the one attention layer."""

    def __init__(self, dim: int, attention: AttentionRequirements) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([AttentionBlock(dim, attention)])
        self.resnets = nn.ModuleList([ResidualBlock(dim, dim), ResidualBlock(dim, dim)])

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Convolve, attend, convolve."""
        x = self.resnets[0](x, carry)
        x = self.attentions[0](x)
        return self.resnets[1](x, carry)


class UpBlock(nn.Module):
    """Wan 2.1's stage: residual blocks, then upsampling that halves the channels."""

    def __init__(self, dim_in: int, dim_out: int, num_res_blocks: int, doubles_frames: bool | None) -> None:
        super().__init__()
        self.resnets = residual_blocks(dim_in, dim_out, num_res_blocks)
        self.upsamplers = nn.ModuleList(
            [] if doubles_frames is None else [Upsample(dim_out, dim_out // 2, doubles_frames)]
        )

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """One stage of the decoder."""
        for resnet in self.resnets:
            x = resnet(x, carry)
        for upsample in self.upsamplers:
            x = upsample(x, carry)
        return x


class ResidualUpBlock(nn.Module):
    """Wan 2.2's stage: residual blocks and upsampling, plus the input copied to the new size."""

    def __init__(self, dim_in: int, dim_out: int, num_res_blocks: int, doubles_frames: bool | None) -> None:
        super().__init__()
        self.resnets = residual_blocks(dim_in, dim_out, num_res_blocks)
        self.upsampler: Upsample | None = None
        self.avg_shortcut: DuplicateUp | None = None
        if doubles_frames is not None:
            self.upsampler = Upsample(dim_out, dim_out, doubles_frames)
            self.avg_shortcut = DuplicateUp(dim_in, dim_out, doubles_frames)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """One stage of the decoder."""
        shortcut = x
        for resnet in self.resnets:
            x = resnet(x, carry)
        if self.upsampler is not None and self.avg_shortcut is not None:
            x = self.upsampler(x, carry)
            x = self.avg_shortcut(x, shortcut, carry)
        return x


class ResidualBlock(nn.Module):
    """Two normalised causal convolutions beside a shortcut."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(dim_in, 3)
        self.conv1 = CausalConv3d(dim_in, dim_out, (3, 3, 3))
        self.norm2 = RMSNorm(dim_out, 3)
        self.conv2 = CausalConv3d(dim_out, dim_out, (3, 3, 3))
        self.conv_shortcut = CausalConv3d(dim_in, dim_out, (1, 1, 1)) if dim_in != dim_out else None

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """The sum of both ways."""
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x, carry)
        x = F.silu(self.norm1(x), inplace=True)
        x = self.conv1(x, carry)
        x = F.silu(self.norm2(x, in_place=True), inplace=True)
        x = self.conv2(x, carry)
        return x.add_(shortcut)


class AttentionBlock(nn.Module):
    """Single-head attention over the positions of each frame."""

    def __init__(self, dim: int, requirements: AttentionRequirements) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, 2)
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.attention = Attention(requirements)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each frame."""
        num, dim, height, width = x.shape
        qkv = self.to_qkv(self.norm(x))
        q_NSHD, k_NSHD, v_NSHD = qkv.permute(0, 2, 3, 1).reshape(num, height * width, 1, 3 * dim).chunk(3, dim=-1)
        out_NSHD = self.attention(q_NSHD, k_NSHD, v_NSHD)
        out = self.proj(out_NSHD.reshape(num, height, width, dim).permute(0, 3, 1, 2))
        return out.add_(x)


class Upsample(nn.Module):
    """Doubles height and width and, where it has a `time_conv`, the frames.

    The clip's first frame stays one frame. It isn't part of the temporal convolution's input either: to the second
    frame, the past is zeros.
    """

    def __init__(self, dim_in: int, dim_out: int, doubles_frames: bool) -> None:
        super().__init__()
        # The checkpoints count the upsampling before the convolution as 0.
        self.resample = nn.ModuleDict({"1": UpsampledConv2d(dim_in, dim_out)})
        self.time_conv = CausalConv3d(dim_in, 2 * dim_in, (3, 1, 1)) if doubles_frames else None

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Time first, then space."""
        if self.time_conv is not None and len(x) > carry.num_first:
            # Each pair of frames comes as the two halves of the channels: [F, B, 2, C, H, W].
            pairs = self.time_conv(x[carry.num_first :], carry).unflatten(0, (-1, carry.batch)).unflatten(2, (2, -1))
            moving = pairs.transpose(1, 2).flatten(0, 2)
            x = torch.cat([x[: carry.num_first], moving]) if carry.is_first else moving
            x = x.contiguous(memory_format=torch.channels_last)
        return self.resample["1"](x)


class DuplicateUp:
    """Adds a stage's input to its output by copying: each channel to several positions, frames and channels."""

    def __init__(self, dim_in: int, dim_out: int, doubles_frames: bool) -> None:
        self.dim_in, self.dim_out = dim_in, dim_out
        self.num_frames = 2 if doubles_frames else 1

    def __call__(self, x: Tensor, source: Tensor, carry: Carry) -> Tensor:
        """Add `source` to `x`, which is larger by the stage's factors, in place."""
        num_first = carry.num_first
        # Of the first frame's copies only the last counts.
        self._add(x[:num_first], source[:num_first], carry.batch, range(self.num_frames - 1, self.num_frames))
        self._add(x[num_first:], source[num_first:], carry.batch, range(self.num_frames))
        return x

    def _add(self, x: Tensor, source: Tensor, batch: int, copies: range) -> None:
        num, _, height, width = source.shape
        if num == 0:
            return
        num_copies = self.num_frames * 4
        repeats = self.dim_out * num_copies // self.dim_in
        target = x.view(num // batch, len(copies), batch, self.dim_out, height, 2, width, 2)
        source = source.view(num // batch, batch, self.dim_in, height, width)
        channels = torch.arange(self.dim_out, device=x.device) * num_copies
        for frame in copies:
            for row in (0, 1):
                for column in (0, 1):
                    # Copy number p of output channel c is input channel (c * num_copies + p) // repeats.
                    copy = (frame * 2 + row) * 2 + column
                    chosen = source if repeats == num_copies else source[:, :, (channels + copy) // repeats]
                    target[:, frame - copies.start, :, :, :, row, :, column] += chosen


class RMSNorm(nn.Module):
    """Scales each position's channels to a root mean square of 1, computed in float32 at least."""

    def __init__(self, dim: int, num_axes: int) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim, *[1] * num_axes))

    def forward(self, x: Tensor, *, in_place: bool = False) -> Tensor:
        """Normalise. The caller may change the result in place; `in_place` lets it take the input's memory."""
        is_half = x.dtype in HALF_TYPES
        wide = x.float() if is_half else x
        inverse = torch.linalg.vector_norm(wide, dim=1, keepdim=True).clamp_min_(1e-12).reciprocal_()
        out = wide.mul_(inverse) if in_place or is_half else wide * inverse
        out.mul_(self.scale * self.gamma.to(out.dtype).view(-1, 1, 1))
        return out.to(x.dtype)


class CausalConv3d(nn.Module):
    """A convolution that sees the present and earlier frames; the shape stays."""

    def __init__(self, dim_in: int, dim_out: int, kernel_size: tuple[int, int, int]) -> None:
        super().__init__()
        # Made for its parameters' names, shapes and initial values.
        conv = nn.Conv3d(dim_in, dim_out, kernel_size)
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """Convolve a chunk, after the frames that `carry` has; before the clip's first frame there are zeros."""
        num_taps, step = self.weight.shape[2], carry.batch
        num = len(x)
        if num_taps > 1:
            if self in carry.tails:
                x = torch.cat([carry.tails.pop(self), x])
            if not carry.is_last:
                carry.tails[self] = x[(1 - num_taps) * step :].clone()
        is_one_tap = num_taps == 1 or len(x) == step
        # On a CPU, torch's 3-D convolution has a fifth of the 2-D one's speed. Elsewhere it is one kernel, whose sum
        # isn't rounded to a half type between the taps.
        convolve = causal_conv_by_tap if is_one_tap or x.is_cpu else causal_conv_at_once
        return convolve(x, self.weight, self.bias, num, step)


def causal_conv_by_tap(x: Tensor, weight: Tensor, bias: Tensor | None, num: int, step: int) -> Tensor:
    """Convolve the last `num` rows of `x`, which are preceded by what is known of the past, `step` rows a frame.

    Each temporal tap of the kernel [C, C, T, H, W] is a 2-D convolution of the frames that it meets; unknown ones are
    zero and cost nothing.
    """
    padding = weight.shape[-1] // 2
    present, *earlier = weight.unbind(2)[::-1]
    out = F.conv2d(x[-num:], present, bias, padding=padding)
    for age, tap in enumerate(earlier, start=1):
        end = max(0, len(x) - age * step)
        seen = x[max(0, end - num) : end]
        if len(seen) > 0:
            out[-len(seen) :] += F.conv2d(seen, tap, padding=padding)
    return out


def causal_conv_at_once(x: Tensor, weight: Tensor, bias: Tensor | None, num: int, step: int) -> Tensor:
    """What `causal_conv_by_tap` does, as one 3-D convolution."""
    missing = num + (weight.shape[2] - 1) * step - len(x)
    if missing:
        x = torch.cat([x.new_zeros(missing, *x.shape[1:]), x])
    x_NHWC = x.permute(0, 2, 3, 1)
    # For a batch of one this is a view that torch knows for channels_last_3d.
    x_BFHWC = x_NHWC[None] if step == 1 else x_NHWC.unflatten(0, (-1, step)).transpose(0, 1).contiguous()
    padding = (0, weight.shape[-2] // 2, weight.shape[-1] // 2)
    out_BCFHW = F.conv3d(x_BFHWC.permute(0, 4, 1, 2, 3), weight, bias, padding=padding)
    out = out_BCFHW.permute(2, 0, 3, 4, 1).flatten(0, 1).permute(0, 3, 1, 2)
    return out.contiguous(memory_format=torch.channels_last)


class UpsampledConv2d(nn.Module):
    """A 3x3 convolution of the image doubled by nearest neighbour, without making that image.

    Each 2x2 of the doubled image has one value, so this equals a transposed convolution of the small image, whose 4x4
    kernel has the sums of the taps that meet the same value: 16 products a value instead of 36.
    """

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        conv = nn.Conv2d(dim_in, dim_out, 3)
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: Tensor) -> Tensor:
        """Double height and width, and convolve."""
        if self.weight.dtype in HALF_TYPES:
            # The sums would be rounded once more than the checkpoint's weights.
            return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest-exact"), self.weight, self.bias, padding=1)
        weight = self.weight.transpose(0, 1)
        for axis in (2, 3):
            first, second, third = weight.unbind(axis)
            weight = torch.stack([third, second + third, first + second, first], axis)
        return F.conv_transpose2d(x, weight, self.bias, stride=2, padding=1)


def residual_blocks(dim_in: int, dim_out: int, num_res_blocks: int) -> nn.ModuleList:
    """A stage's residual blocks, one more than `num_res_blocks`."""
    return nn.ModuleList(ResidualBlock(dim_in if i == 0 else dim_out, dim_out) for i in range(num_res_blocks + 1))


def unpatchify_into(frames_BCFHW: Tensor, x: Tensor, patch: int) -> None:
    """Write patches [N, channels x patch x patch, H, W] into frames as pixels; a patch is stored column by column."""
    batch, channels, num_frames, height, width = frames_BCFHW.shape
    pixels = frames_BCFHW.view(batch, channels, num_frames, height // patch, patch, width // patch, patch)
    patches = x.view(num_frames, batch, channels, patch, patch, height // patch, width // patch)
    pixels.copy_(patches.permute(1, 2, 0, 5, 4, 6, 3))
