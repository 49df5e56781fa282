"""Wan, the text-to-video diffusion transformer, in diffusers' checkpoint layout.

Reference: diffusers' WanTransformer3DModel; Wan Team 2025, "Wan: Open and Advanced Large-Scale Video Generative
Models". Shapes: B batch, S video tokens, T text tokens, H heads, D hidden size, N steps, L blocks.

What doesn't change between steps is computed once: rotary table, modulation of all timesteps, and each block's keys
and values of the text. Text rows past a prompt's end are zero, hence all alike: they become one key whose score is
raised by the logarithm of their number, which gives the same attention (two keys in half types, to be exact enough).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from safelight.attention.backend import Layout
from safelight.attention.layer import Attention
from safelight.attention.requirements import AttentionRequirements
from safelight.layers.embeddings import timestep_features
from safelight.layers.rope import rotary_table, rotate
from safelight.models.wan_config import WanConfig

if TYPE_CHECKING:
    from safelight.distributed.mesh import Mesh

FLOAT32_PARTS = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")


def keeps_float32(name: str) -> bool:
    """Whether the reference keeps this parameter in float32 whatever the model's dtype."""
    return any(part in FLOAT32_PARTS for part in name.split("."))


@dataclass(frozen=True)
class Modulation:
    """One step's modulation, float32.

    `blocks` [L, 6, D]: shift, 1 + scale and gate of attention, then of feed-forward; `out` [2, D]: shift and 1 + scale
    of the output. Rows with timesteps of their own have [B, 1, D] in place of [D].
    """

    blocks: Tensor
    out: Tensor


@dataclass(frozen=True)
class TextContext:
    """The text as each block's cross-attention sees it: keys and values [B, T, H, head_dim], once per request.

    `bias` [B, 1, 1, T] is None where every key counts once.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    bias: Tensor | None


class WanTransformer(nn.Module):
    """Predicts the flow's velocity for noisy video latents."""

    def __init__(self, config: WanConfig, dtype: torch.dtype = torch.float32, component: str = "transformer") -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self_group, cross_group = config.attention_groups(str(dtype).removeprefix("torch."), component)
        self.patch_embedding = nn.Conv3d(config.in_channels, dim, config.patch_size, config.patch_size)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks: Sequence[WanBlock] = nn.ModuleList(  # type: ignore[assignment]  # ModuleList isn't generic
            WanBlock(config, self_group.requirements, cross_group.requirements) for _ in range(config.num_layers)
        )
        self.proj_out = nn.Linear(dim, config.out_channels * math.prod(config.patch_size))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return self.proj_out.weight.dtype

    def fuse(self) -> None:
        """Lay projections that share an input next to each other, so that one product serves them.

        The parameters become views of the joint storage: names, shapes and memory stay as they are.
        """
        for block in self.blocks:
            block.attn1.fuse_qkv()

    def grid(self, latents_BCFHW: Tensor) -> tuple[int, int, int]:
        """The token grid (t, h, w) of latents."""
        t, h, w = (size // patch for size, patch in zip(latents_BCFHW.shape[2:], self.config.patch_size, strict=True))
        return (t, h, w)

    def rotary(self, grid: tuple[int, int, int]) -> Tensor:
        """The rotary table of a token grid."""
        return rotary_table(grid, self.config.rotary_axes, device=self.proj_out.weight.device)

    def modulations(self, timesteps_N: Tensor) -> list[Modulation]:
        """The modulation of each timestep (0 to 1000), for all steps in one pass."""
        blocks_NL6D, out_N2D = self._modulate(timesteps_N)
        return [Modulation(blocks, out) for blocks, out in zip(blocks_NL6D, out_N2D, strict=True)]

    def row_modulation(self, timesteps_B: Tensor) -> Modulation:
        """One modulation in which each row of the batch has its own timestep."""
        blocks_BL6D, out_B2D = self._modulate(timesteps_B)
        return Modulation(blocks_BL6D.permute(1, 2, 0, 3)[..., None, :], out_B2D.transpose(0, 1)[:, :, None])

    def _modulate(self, timesteps_N: Tensor) -> tuple[Tensor, Tensor]:
        embedding_ND, projection_N6D = self.condition_embedder.time(timesteps_N, self.dtype)
        tables_L6D = torch.cat([block.scale_shift_table for block in self.blocks])
        ones_6 = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0], device=tables_L6D.device)
        blocks_NL6D = tables_L6D + projection_N6D[:, None].float() + ones_6[:, None]
        out_N2D = self.scale_shift_table + embedding_ND[:, None].float() + ones_6[:2, None]
        return blocks_NL6D, out_N2D

    def text_context(self, states_BTC: Tensor, num_tokens: list[int], length: int) -> TextContext:
        """Keys and values of the text for every block.

        `states_BTC` [batch, tokens, text_dim] is zero past each prompt's `num_tokens`; the model expects `length` rows.
        Where cross-attention takes an additive bias, the zero rows are merged into one key.
        """
        longest = max(num_tokens)
        states_BTC = states_BTC[:, :longest].to(self.dtype)
        # One logarithm in a half type would err by up to 1.6 % of the weight; two by 0.05 %.
        num_merged = 1 if self.dtype.itemsize > 2 else 2
        merges = all(block.attn2.attend.accepts("bias") for block in self.blocks) and longest + num_merged < length
        rows = longest + num_merged if merges else length
        states_BTC = F.pad(states_BTC, (0, 0, 0, rows - states_BTC.shape[1]))
        bias = None
        if merges:
            counts_B = torch.tensor(num_tokens)
            bias_BT = torch.zeros(len(num_tokens), rows, dtype=self.dtype)
            bias_BT.masked_fill_(torch.arange(rows) >= counts_B[:, None], -torch.inf)
            bias_BT[:, longest:] = _logarithms(length - counts_B, num_merged, self.dtype)
            bias = bias_BT[:, None, None].to(states_BTC.device)
        text_BTD = self.condition_embedder.text_embedder(states_BTC)
        pairs = [block.attn2.keys_values(text_BTD) for block in self.blocks]
        return TextContext(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), bias)

    def forward(
        self,
        latents_BCFHW: Tensor,
        modulation: Modulation,
        text: TextContext,
        rotary: Tensor,
        layout: Layout | None = None,
        mesh: "Mesh | None" = None,
    ) -> Tensor:
        """The velocity, shaped like the latents [batch, channels, frames, height, width].

        Each rank of a mesh runs the blocks on its own tokens, whose `rotary` it is given, and gets all of the result.
        """
        grid = self.grid(latents_BCFHW)
        patches_BSP = self._patches(latents_BCFHW)
        x_BSD = self._embed_patches(patches_BSP if mesh is None else mesh.own(patches_BSP))
        for i, block in enumerate(self.blocks):
            x_BSD = block(x_BSD, modulation.blocks[i], text.keys[i], text.values[i], text.bias, rotary, layout)
        shift, scale = modulation.out
        x_BSD = _layer_norm(x_BSD, scale, shift, self.config.eps)
        x_BSP = self.proj_out(x_BSD)
        return self._unpatchify(x_BSP if mesh is None else mesh.whole(x_BSP, math.prod(grid)), grid)

    def _patches(self, latents_BCFHW: Tensor) -> Tensor:
        t, h, w = self.config.patch_size
        patches = latents_BCFHW.unflatten(4, (-1, w)).unflatten(3, (-1, h)).unflatten(2, (-1, t))
        return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)

    def _embed_patches(self, patches_BSP: Tensor) -> Tensor:
        """The patch convolution as one matrix product: its stride is its size."""
        convolution = self.patch_embedding
        return F.linear(patches_BSP.to(self.dtype), convolution.weight.flatten(1), convolution.bias)

    def _unpatchify(self, x_BSP: Tensor, grid: tuple[int, int, int]) -> Tensor:
        patches = x_BSP.unflatten(2, (*self.config.patch_size, -1)).unflatten(1, grid)
        return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class WanBlock(nn.Module):
    """Self-attention over the video, cross-attention to the text, feed-forward."""

    def __init__(
        self, config: WanConfig, self_attention: AttentionRequirements, cross_attention: AttentionRequirements
    ) -> None:
        super().__init__()
        self.eps = config.eps
        self.attn1 = WanSelfAttention(config, self_attention)
        self.attn2 = WanCrossAttention(config, cross_attention)
        self.norm2 = nn.LayerNorm(config.dim, config.eps) if config.cross_attn_norm else None
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)

    def forward(
        self,
        x_BSD: Tensor,
        modulation_6D: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor | None,
        rotary: Tensor,
        layout: Layout | None,
    ) -> Tensor:
        """One block of the residual stream."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation_6D.unbind(0)
        attended = self.attn1(_layer_norm(x_BSD, scale, shift, self.eps), rotary, layout)
        x_BSD = _gated(x_BSD, attended, gate)
        query = x_BSD if self.norm2 is None else _layer_norm(x_BSD, self.norm2.weight, self.norm2.bias, self.eps)
        x_BSD = x_BSD + self.attn2(query, keys, values, bias, layout)
        return _gated(x_BSD, self.ffn(_layer_norm(x_BSD, ffn_scale, ffn_shift, self.eps)), ffn_gate)


class WanAttention(nn.Module):
    """The projections that both attentions have; queries and keys are normalised across all heads."""

    def __init__(self, config: WanConfig, requirements: AttentionRequirements) -> None:
        super().__init__()
        dim = config.dim
        self.head_dim = config.attention_head_dim
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q = nn.RMSNorm(dim, config.eps)
        self.norm_k = nn.RMSNorm(dim, config.eps)
        self.attend = Attention(requirements)

    def heads(self, x_BSD: Tensor) -> Tensor:
        """Split the hidden size: [batch, seq, heads, head_dim]."""
        return x_BSD.unflatten(-1, (-1, self.head_dim))


class WanSelfAttention(WanAttention):
    """Attention of the video's tokens to each other, with rotary positions."""

    fused: tuple[Tensor, Tensor] | None = None

    def fuse_qkv(self) -> None:
        """Make the three projections views of one weight and one bias."""
        parts = (self.to_q, self.to_k, self.to_v)
        weight = torch.cat([part.weight for part in parts]).detach()
        bias = torch.cat([part.bias for part in parts]).detach()
        for part, weight_view, bias_view in zip(parts, weight.chunk(3), bias.chunk(3), strict=True):
            part.weight = nn.Parameter(weight_view, requires_grad=False)
            part.bias = nn.Parameter(bias_view, requires_grad=False)
        self.fused = (weight, bias)

    def forward(self, x_BSD: Tensor, rotary: Tensor, layout: Layout | None) -> Tensor:
        """Attend within the sequence."""
        if self.fused is None:
            q, k, v = self.to_q(x_BSD), self.to_k(x_BSD), self.to_v(x_BSD)
        else:
            q, k, v = F.linear(x_BSD, *self.fused).chunk(3, dim=-1)
        q_BSHD = rotate(self.heads(self.norm_q(q)), rotary)
        k_BSHD = rotate(self.heads(self.norm_k(k)), rotary)
        return self.to_out[0](self.attend(q_BSHD, k_BSHD, self.heads(v), layout=layout).flatten(2))


class WanCrossAttention(WanAttention):
    """Attention of the video's tokens to the text."""

    def keys_values(self, text_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, text, heads, head_dim] of embedded text."""
        return self.heads(self.norm_k(self.to_k(text_BTD))), self.heads(self.to_v(text_BTD))

    def forward(
        self, x_BSD: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, layout: Layout | None
    ) -> Tensor:
        """Attend to keys and values made by `keys_values`."""
        q_BSHD = self.heads(self.norm_q(self.to_q(x_BSD)))
        return self.to_out[0](self.attend(q_BSHD, keys, values, mask=bias, layout=layout).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers around a tanh-approximated GELU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"0": GeluProjection(dim, hidden), "2": nn.Linear(hidden, dim)})

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Feed each token forward."""
        return self.net["2"](self.net["0"](x_BSD))


class GeluProjection(nn.Module):
    """A linear layer and the activation."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Project and activate."""
        return F.gelu(self.proj(x_BSD), approximate="tanh")


class TwoLayer(nn.Module):
    """Linear, activation, linear, with the names diffusers' embeddings have."""

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(dim_in, dim_out)
        self.linear_2 = nn.Linear(dim_out, dim_out)


class TimeEmbedder(TwoLayer):
    """Timestep features to the hidden size."""

    def forward(self, x: Tensor) -> Tensor:
        """Embed features [N, freq_dim]."""
        return self.linear_2(F.silu(self.linear_1(x)))


class TextEmbedder(TwoLayer):
    """Text states to the hidden size."""

    def forward(self, x: Tensor) -> Tensor:
        """Embed states [batch, tokens, text_dim]."""
        return self.linear_2(F.gelu(self.linear_1(x), approximate="tanh"))


class ConditionEmbedder(nn.Module):
    """Embeds time and text."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.freq_dim = config.freq_dim
        self.time_embedder = TimeEmbedder(config.freq_dim, config.dim)
        self.time_proj = nn.Linear(config.dim, config.dim * 6)
        self.text_embedder = TextEmbedder(config.text_dim, config.dim)

    def time(self, timesteps_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Embeddings [N, dim] and block modulations [N, 6, dim] of timesteps."""
        features = timestep_features(timesteps_N, self.freq_dim).to(self.time_embedder.linear_1.weight.dtype)
        embedding_ND = self.time_embedder(features).to(dtype)
        return embedding_ND, self.time_proj(F.silu(embedding_ND)).unflatten(1, (6, -1))


def _logarithms(counts_B: Tensor, num_parts: int, dtype: torch.dtype) -> Tensor:
    """Numbers [B, num_parts] of `dtype` whose exponentials sum to the counts; each makes up for those before it."""
    rest_B = counts_B.double()
    parts = []
    for i in range(num_parts):
        log_B = rest_B.log()
        if i + 1 < num_parts:
            log_B -= log_B.abs() * torch.finfo(dtype).eps  # never above, so that there is a rest
        parts.append(log_B.to(dtype))
        rest_B = (rest_B - parts[-1].double().exp()).clamp(min=0)
    return torch.stack(parts, dim=1)


def _layer_norm(x_BSD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Layer norm with modulation as its affine part, in float32; the result has x's dtype."""
    if weight_D.ndim == 1:
        return F.layer_norm(x_BSD.float(), weight_D.shape, weight_D, bias_D, eps).type_as(x_BSD)
    normed_BSD = F.layer_norm(x_BSD.float(), x_BSD.shape[-1:], None, None, eps)
    return (normed_BSD * weight_D + bias_D).type_as(x_BSD)


def _gated(x_BSD: Tensor, update_BSD: Tensor, gate_D: Tensor) -> Tensor:
    """The residual stream plus a gated update, summed in float32."""
    return torch.addcmul(x_BSD.float(), update_BSD.float(), gate_D).type_as(x_BSD)
