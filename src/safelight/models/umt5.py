"""The UMT5 text encoder (Chung et al., "UniMax", 2023; T5 v1.1 with a relative position bias in every layer).

State-dict keys and shapes are those of transformers' UMT5EncoderModel, and so are the numbers. There is no dropout:
the encoder only runs, it isn't trained. Axes: B batch, S tokens, Q queries, K keys, H heads, D d_kv, M d_model.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from safelight.attention.layer import Attention
from safelight.models.umt5_config import Umt5Config

# Names of one and the same tensor. A checkpoint may hold either or both, whatever its tie_word_embeddings says: either
# one fills both; where both are there they must be equal.
TIED: tuple[tuple[str, ...], ...] = (("shared.weight", "encoder.embed_tokens.weight"),)


def weight_dtype(key: str, dtype: str) -> str:
    """The dtype in which the weight `key` is held when the encoder runs in `dtype` (both are torch's names).

    The feed-forward's last projection overflows in float16, so it stays float32 there, as in transformers
    (`_keep_in_fp32_modules`, which bfloat16 doesn't touch).
    """
    return "float32" if dtype == "float16" and key.endswith(".wo.weight") else dtype


class Umt5Encoder(nn.Module):
    """The encoder. `dtype`, a torch dtype's name, is what its attention layers ask their kernel to take.

    Bind a kernel to its Attention layers before running it.
    """

    def __init__(self, config: Umt5Config, dtype: str = "float32") -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Umt5Stack(config, self.shared, dtype)

    def forward(self, token_ids_BS: Tensor, key_padding_BS: Tensor | None = None) -> Tensor:
        """States [batch, seq, d_model] of token ids [batch, seq].

        `key_padding_BS` is bool, True for a real token; None means that all are real. States at padded positions are
        defined but meaningless. `encode_prompts` does without padding.
        """
        states_BSM: Tensor = self.encoder(token_ids_BS, key_padding_BS)
        return states_BSM


def encode_prompts(encoder: Umt5Encoder, prompts: Sequence[Sequence[int]], num_rows: int) -> Tensor:
    """States [prompts, num_rows, d_model] of token ids without padding; rows past a prompt's end are exactly zero.

    Every prompt runs at its own length, so that nothing is spent on padding and a prompt's states are bit for bit the
    same alone and in company.
    """
    weight = encoder.encoder.final_layer_norm.weight
    states_BSM = torch.zeros(len(prompts), num_rows, encoder.config.d_model, dtype=weight.dtype, device=weight.device)
    for states_SM, token_ids in zip(states_BSM, prompts, strict=True):
        token_ids_BS = torch.tensor([token_ids], dtype=torch.long, device=weight.device)
        states_SM[: len(token_ids)] = encoder(token_ids_BS)[0]
    return states_BSM


class Umt5Stack(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: Umt5Config, embed_tokens: nn.Embedding, dtype: str) -> None:
        super().__init__()
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.embed_tokens = embed_tokens
        self.block = nn.ModuleList(Umt5Block(config, dtype) for _ in range(config.num_layers))
        self.final_layer_norm = Umt5Norm(config)

    def forward(self, token_ids_BS: Tensor, key_padding_BS: Tensor | None) -> Tensor:
        x_BSM = self.embed_tokens(token_ids_BS)
        buckets_QK = position_buckets(
            token_ids_BS.shape[1], self.num_buckets, self.max_distance, device=token_ids_BS.device
        )
        for block in self.block:
            x_BSM = block(x_BSM, buckets_QK, key_padding_BS)
        states_BSM: Tensor = self.final_layer_norm(x_BSM)
        return states_BSM


class Umt5Block(nn.Module):
    """Self-attention, then feed-forward; both add to the residual stream."""

    def __init__(self, config: Umt5Config, dtype: str) -> None:
        super().__init__()
        self.layer = nn.ModuleList((Umt5AttentionLayer(config, dtype), Umt5FeedForwardLayer(config)))

    def forward(self, x_BSM: Tensor, buckets_QK: Tensor, key_padding_BS: Tensor | None) -> Tensor:
        attention, feed_forward = self.layer
        x_BSM = _without_overflow(x_BSM + attention(x_BSM, buckets_QK, key_padding_BS))
        return _without_overflow(x_BSM + feed_forward(x_BSM))


class Umt5AttentionLayer(nn.Module):
    """Norm and self-attention."""

    def __init__(self, config: Umt5Config, dtype: str) -> None:
        super().__init__()
        self.SelfAttention = Umt5SelfAttention(config, dtype)
        self.layer_norm = Umt5Norm(config)

    def forward(self, x_BSM: Tensor, buckets_QK: Tensor, key_padding_BS: Tensor | None) -> Tensor:
        out_BSM: Tensor = self.SelfAttention(self.layer_norm(x_BSM), buckets_QK, key_padding_BS)
        return out_BSM


class Umt5SelfAttention(nn.Module):
    """Attention with a learned bias per head and distance, and no scaling of the scores."""

    def __init__(self, config: Umt5Config, dtype: str) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.attention = Attention(config.attention_requirements(dtype))

    def forward(self, x_BSM: Tensor, buckets_QK: Tensor, key_padding_BS: Tensor | None) -> Tensor:
        q_BSHD, k_BSHD, v_BSHD = (
            projection(x_BSM).unflatten(-1, (self.num_heads, -1)) for projection in (self.q, self.k, self.v)
        )
        bias_BHQK = self.relative_attention_bias.weight.t()[:, buckets_QK][None]
        if key_padding_BS is not None:
            bias_BHQK = bias_BHQK.masked_fill(~key_padding_BS[:, None, None, :], -torch.inf)
        out_BSHD = self.attention(q_BSHD, k_BSHD, v_BSHD, mask=bias_BHQK)
        out_BSM: Tensor = self.o(out_BSHD.flatten(2))
        return out_BSM


class Umt5FeedForwardLayer(nn.Module):
    """Norm and feed-forward."""

    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.DenseReluDense = GatedFeedForward(config) if config.is_gated else ReluFeedForward(config)
        self.layer_norm = Umt5Norm(config)

    def forward(self, x_BSM: Tensor) -> Tensor:
        out_BSM: Tensor = self.DenseReluDense(self.layer_norm(x_BSM))
        return out_BSM


class GatedFeedForward(nn.Module):
    """feed_forward_proj "gated-gelu": GELU in its tanh form, times a second projection."""

    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BSM: Tensor) -> Tensor:
        hidden = gelu(self.wi_0(x_BSM), approximate="tanh") * self.wi_1(x_BSM)
        out_BSM: Tensor = self.wo(hidden.to(self.wo.weight.dtype))  # float32 in a float16 run: see weight_dtype
        return out_BSM


class ReluFeedForward(nn.Module):
    """feed_forward_proj "relu"."""

    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BSM: Tensor) -> Tensor:
        out_BSM: Tensor = self.wo(relu(self.wi(x_BSM)).to(self.wo.weight.dtype))
        return out_BSM


class Umt5Norm(nn.Module):
    """Root-mean-square norm, computed in float32 and returned in the weight's dtype."""

    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.epsilon = config.layer_norm_epsilon

    def forward(self, x_BSM: Tensor) -> Tensor:
        variance = x_BSM.float().square().mean(-1, keepdim=True)
        # The stream is float32 after a float32 `wo`; here it comes back to the run's dtype.
        return self.weight * (x_BSM * torch.rsqrt(variance + self.epsilon)).to(self.weight.dtype)


def position_buckets(length: int, num_buckets: int, max_distance: int, device: torch.device) -> Tensor:
    """The bias bucket of every (query, key) pair, int64 [queries, keys] (Raffel et al. 2020, section 2.1).

    Half of the buckets are for keys after the query. Of each half, the lower half holds one distance each, the rest
    grows logarithmically, and everything from `max_distance` on shares the last.
    """
    positions_S = torch.arange(length, device=device)
    offset_QK = positions_S[None, :] - positions_S[:, None]
    distance_QK = offset_QK.abs()
    per_side = num_buckets // 2
    num_exact = per_side // 2
    # The order of operations is transformers': a distance on the border of two buckets must fall on the same side.
    growth_QK = torch.log(distance_QK.clamp(min=num_exact).float() / num_exact) / math.log(max_distance / num_exact)
    far_QK = (num_exact + (growth_QK * (per_side - num_exact)).long()).clamp(max=per_side - 1)
    return torch.where(distance_QK < num_exact, distance_QK, far_QK) + per_side * (offset_QK > 0)


def _without_overflow(x_BSM: Tensor) -> Tensor:
    """Bring infinities of a float16 residual stream back into range, as transformers does."""
    if x_BSM.dtype != torch.float16:
        return x_BSM
    largest = torch.finfo(torch.float16).max
    limit = torch.where(torch.isinf(x_BSM).any(), largest - 1000, largest)
    return torch.clamp(x_BSM, min=-limit, max=limit)
