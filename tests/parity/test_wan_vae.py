"""The Wan VAE's decoder against diffusers' AutoencoderKLWan, and its configuration's checks."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from safelight.attention.backend import Layout
from safelight.attention.backends.sdpa import BACKEND
from safelight.attention.layer import Attention
from safelight.errors import CheckpointError
from safelight.models.wan_vae import (
    ENCODER_PREFIXES,
    Carry,
    ResidualBlock,
    RMSNorm,
    Upsample,
    WanVaeDecoder,
    causal_conv_at_once,
    causal_conv_by_tap,
)
from safelight.models.wan_vae_config import WanVaeConfig

parity = pytest.mark.parity

TOLERANCE = 1e-5  # of the largest output

# Both forms, small. Random statistics, so that a mean taken for another would show.
WAN_2_1 = {
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [0.5, -1, 0, 2],
    "latents_std": [1, 2, 3, 0.5],
}
WAN_2_2 = {
    **WAN_2_1,
    "base_dim": 4,
    "decoder_base_dim": 8,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
}
SMALL = {"dim_mult": [1, 2, 2], "temperal_downsample": [True, True]}
CONFIGS: dict[str, dict[str, Any]] = {
    "2.1": WAN_2_1,
    "2.1-time-first": {**WAN_2_1, "temperal_downsample": [True, True, False], "num_res_blocks": 2},
    "2.2": WAN_2_2,
    "2.2-demo": {**WAN_2_2, **SMALL, "scale_factor_spatial": 8},
    # A stage that doubles the channels, and one that quarters them while it doubles the frames.
    "2.2-uneven": {**WAN_2_2, "dim_mult": [1, 1, 4, 2], "temperal_downsample": [True, True, False]},
    "2.2-unpatched": {**WAN_2_1, **SMALL, "is_residual": True, "scale_factor_spatial": 4},
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Wan 2.1": {},
    "Wan 2.2 5B": {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "dropout": 0.0,
        "latents_mean": [0.01 * i for i in range(48)],
        "latents_std": [1 + 0.01 * i for i in range(48)],
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 16,
    },
}


def reference_vae(config: dict[str, Any]) -> Any:
    """diffusers' class with weights that make every part count: no norm is one, no bias is nearly zero."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    vae = AutoencoderKLWan(**config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in vae.named_parameters():
            fan_in = value[0].numel() if value.ndim > 3 else 1
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("gamma"):
                value.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                value.copy_(0.1 * noise)
            else:
                value.copy_(noise / fan_in**0.5)
        # Keeps the output inside [-1, 1], where nothing is clamped.
        vae.decoder.conv_out.weight.mul_(0.3)
    return vae


def decoder_like(vae: Any, dtype: torch.dtype = torch.float32) -> WanVaeDecoder:
    """Our decoder with diffusers' weights, and sdpa bound."""
    decoder = WanVaeDecoder(WanVaeConfig.from_json(dict(vae.config)), dtype).eval()
    decoder.load_state_dict({k: v for k, v in vae.state_dict().items() if not k.startswith(ENCODER_PREFIXES)})
    bind_sdpa(decoder)
    return decoder


def bind_sdpa(decoder: WanVaeDecoder) -> None:
    """Give the attention layer its kernel."""
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.kernel = BACKEND.load(module.requirements)


def reference_frames(vae: Any, latents: Tensor) -> Tensor:
    """What diffusers decodes."""
    with torch.no_grad():
        return vae.decode(latents, return_dict=False)[0]


def random_latents(config: dict[str, Any], batch: int, frames: int, rows: int, columns: int, seed: int = 3) -> Tensor:
    """Latents [batch, z_dim, frames, rows, columns], all different."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, config["z_dim"], frames, rows, columns, generator=generator)


def relative_error(found: Tensor, right: Tensor) -> float:
    """Largest difference, as a share of the largest right value."""
    assert found.shape == right.shape
    return ((found.double() - right.double()).abs().max() / right.abs().max()).item()


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest) -> tuple[Any, WanVaeDecoder]:
    """diffusers' autoencoder and our decoder with the same weights."""
    vae = reference_vae(CONFIGS[request.param])
    return vae, decoder_like(vae)


@pytest.fixture(scope="module")
def demo_pair() -> tuple[Any, WanVaeDecoder]:
    """The same for one configuration, where a test needs no more."""
    vae = reference_vae(CONFIGS["2.2-demo"])
    return vae, decoder_like(vae)


@parity
@pytest.mark.parametrize(("batch", "rows", "columns"), [(1, 3, 5), (2, 4, 2), (1, 1, 1)])
@pytest.mark.parametrize("num_frames", [1, 5, 9, 17])
def test_frames_equal_diffusers(
    pair: tuple[Any, WanVaeDecoder], num_frames: int, batch: int, rows: int, columns: int
) -> None:
    vae, decoder = pair
    latents = random_latents(vae.config, batch, 1 + (num_frames - 1) // 4, rows, columns)
    right = reference_frames(vae, latents)
    assert right.std() > 0.05
    assert (right.abs() == 1).float().mean() < 0.05
    found = decoder.decode(latents)
    factor = decoder.config.spatial_factor
    assert found.shape == (batch, 3, num_frames, rows * factor, columns * factor)
    assert found.dtype == torch.float32
    assert relative_error(found, right) <= TOLERANCE


@parity
def test_what_leaves_the_range_is_clamped(demo_pair: tuple[Any, WanVaeDecoder]) -> None:
    vae = reference_vae(CONFIGS["2.2-demo"])
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(8)
    latents = random_latents(vae.config, 1, 2, 2, 3)
    found = decoder_like(vae).decode(latents)
    assert (found.min(), found.max()) == (-1, 1)
    assert relative_error(found, reference_frames(vae, latents)) <= TOLERANCE


@parity
@pytest.mark.parametrize(("batch", "chunk_length"), [(1, 1), (2, 1), (2, 2), (2, 4)])
def test_chunks_do_not_change_the_result(pair: tuple[Any, WanVaeDecoder], batch: int, chunk_length: int) -> None:
    vae, decoder = pair
    num_latents = 5
    latents = random_latents(vae.config, batch, num_latents, 2, 3)
    calls: list[tuple[int, int]] = []
    pixels = batch * decoder.config.temporal_factor * 6 * decoder.config.spatial_factor**2
    found = decoder.decode(
        latents, max_chunk_pixels=pixels * chunk_length, on_chunk=lambda done, total: calls.append((done, total))
    )
    total = -(-num_latents // chunk_length)
    assert calls == [(i, total) for i in range(1, total + 1)]
    assert relative_error(found, reference_frames(vae, latents)) <= TOLERANCE
    # A pixel fewer, and a chunk holds a latent frame fewer, if it has one to spare.
    calls.clear()
    decoder.decode(latents, max_chunk_pixels=pixels * chunk_length - 1, on_chunk=lambda *call: calls.append(call))
    assert len(calls) == -(-num_latents // max(1, chunk_length - 1))


def let_time_conv_see_the_first_frame(decoder: WanVaeDecoder) -> None:
    def plant(module: Upsample, arguments: tuple[Tensor, Carry]) -> None:
        x, carry = arguments
        if module.time_conv is not None and carry.is_first:
            carry.tails[module.time_conv] = x[: carry.batch]

    for module in decoder.modules():
        if isinstance(module, Upsample):
            module.register_forward_pre_hook(plant)


def forget_earlier_frames(decoder: WanVaeDecoder) -> None:
    def plant(module: ResidualBlock, arguments: tuple[Tensor, Carry]) -> None:
        arguments[1].tails.pop(module.conv1, None)

    decoder.decoder.mid_block.resnets[1].register_forward_pre_hook(plant)


@parity
@pytest.mark.parametrize(
    "plant",
    [let_time_conv_see_the_first_frame, forget_earlier_frames],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("name", ["2.1", "2.2"])
def test_the_comparison_sees_a_wrong_treatment_of_time(name: str, plant: Callable[[WanVaeDecoder], None]) -> None:
    vae = reference_vae(CONFIGS[name])
    decoder = decoder_like(vae)
    plant(decoder)
    latents = random_latents(vae.config, 1, 3, 2, 3)
    right = reference_frames(vae, latents)
    assert relative_error(decoder.decode(latents, max_chunk_pixels=1), right) > 1000 * TOLERANCE


@parity
def test_a_first_frame_treated_like_the_others_does_not_fit(demo_pair: tuple[Any, WanVaeDecoder]) -> None:
    vae, _ = demo_pair
    decoder = decoder_like(vae)

    def plant(module: nn.Module, arguments: tuple[Tensor, Carry]) -> None:
        arguments[1].is_first = False

    decoder.decoder.register_forward_pre_hook(plant)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        decoder.decode(random_latents(vae.config, 1, 2, 2, 3))


@parity
def test_nothing_is_left_from_one_call_to_the_next(demo_pair: tuple[Any, WanVaeDecoder]) -> None:
    vae, decoder = demo_pair
    one, other = (random_latents(vae.config, 1, 3, 2, 2, seed) for seed in (1, 2))
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    alone = decoder.decode(other, max_chunk_pixels=1)
    decoder.decode(one, max_chunk_pixels=1)
    kept = one.clone()

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        decoder.decode(one, max_chunk_pixels=1, on_chunk=stop)
    assert torch.equal(decoder.decode(other, max_chunk_pixels=1), alone)
    assert torch.equal(one, kept)
    assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items())


@parity
@pytest.mark.parametrize("name", ["2.1", "2.2", "2.2-uneven"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "num_latents"), [(1, 1), (1, 3), (2, 3)])
def test_half_types_are_as_near_to_the_truth_as_diffusers(
    name: str, dtype: torch.dtype, batch: int, num_latents: int
) -> None:
    vae = reference_vae(CONFIGS[name])
    # Weights that both types hold exactly, so that only the computation differs.
    vae.to(dtype).to(torch.float32)
    latents = random_latents(vae.config, batch, num_latents, 3, 2).to(dtype)
    truth = reference_frames(vae, latents.float())
    found = decoder_like(vae, dtype).decode(latents)
    assert found.dtype == dtype
    theirs = reference_frames(vae.to(dtype), latents)
    own_error, their_error = ((frames.float() - truth).square().mean().sqrt() for frames in (found, theirs))
    assert 0 < own_error <= 1.2 * their_error


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (3, 1, 1)])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("num_frames", [1, 2, 4])
@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_both_forms_of_the_causal_convolution_equal_a_padded_one(
    num_known: int, num_frames: int, step: int, kernel_size: tuple[int, int, int]
) -> None:
    generator = torch.Generator().manual_seed(4)
    frames_BCFHW = torch.randn(step, 5, num_known + num_frames, 3, 4, generator=generator)
    weight = torch.randn(6, 5, *kernel_size, generator=generator)
    bias = torch.randn(6, generator=generator)
    edge = kernel_size[1] // 2
    padded = F.pad(frames_BCFHW, (edge, edge, edge, edge, 2, 0))
    right = F.conv3d(padded, weight, bias)[:, :, num_known:].transpose(1, 2).transpose(0, 1).flatten(0, 1)
    x = frames_BCFHW.permute(2, 0, 1, 3, 4).flatten(0, 1).contiguous(memory_format=torch.channels_last)
    for convolve in (causal_conv_by_tap, causal_conv_at_once):
        found = convolve(x, weight, bias, num_frames * step, step)
        assert relative_error(found, right) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-15, 1e-8, 1.0, 1e8])
def test_the_norm_takes_positions_of_any_size(size: float, dtype: torch.dtype) -> None:
    norm = RMSNorm(8, 3).to(dtype)
    x = (size * torch.linspace(1, 2, 8).view(1, 8, 1, 1).repeat(2, 1, 2, 3)).to(dtype)
    x[1, :, 1, 2] = 0
    right = 8**0.5 * F.normalize(x.float(), dim=1)
    found = norm(x)
    assert found.dtype == dtype
    assert torch.equal(found[1, :, 1, 2], torch.zeros(8, dtype=dtype))
    torch.testing.assert_close(found.float(), right, atol=0, rtol=1e-6 if dtype == torch.float32 else 2**-8)
    assert torch.equal(norm(x.clone(), in_place=True), found)


@parity
@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_published_checkpoints_have_our_keys_and_shapes(config: dict[str, Any]) -> None:
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    with torch.device("meta"):
        vae = AutoencoderKLWan(**config)
        decoder = WanVaeDecoder(WanVaeConfig.from_json(dict(vae.config)))
    assert decoder.dtype == torch.float32
    assert {name: value.shape for name, value in decoder.state_dict().items()} == {
        name: value.shape for name, value in vae.state_dict().items() if not name.startswith(ENCODER_PREFIXES)
    }


@parity
def test_every_key_of_diffusers_class_is_read_with_its_default() -> None:
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

    parameters = inspect.signature(AutoencoderKLWan.__init__).parameters
    theirs = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
    config = WanVaeConfig.from_json(theirs)
    ours = {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(config).items()}
    assert ours == theirs
    # A file that leaves everything out means the same, and its factors come from the architecture.
    silent = WanVaeConfig.from_json({})
    assert silent == dataclasses.replace(config, scale_factor_temporal=None, scale_factor_spatial=None)
    assert (silent.spatial_factor, silent.temporal_factor) == (8, 4)


def test_denormalised_latents_have_the_configured_statistics() -> None:
    decoder = WanVaeDecoder(WanVaeConfig.from_json(WAN_2_1))
    latents = torch.tensor([1.0, 1.0, -1.0, 2.0]).view(1, 4, 1, 1, 1).expand(2, 4, 3, 1, 2)
    found = decoder.denormalise(latents)
    assert found.shape == latents.shape
    assert torch.equal(found[1, :, 2, 0, 1], torch.tensor([1.5, 1.0, -3.0, 3.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_sees_the_positions_of_each_frame(dtype: torch.dtype) -> None:
    config = WanVaeConfig.from_json(WAN_2_2)
    decoder = WanVaeDecoder(config, dtype)
    (layer,) = (module for module in decoder.modules() if isinstance(module, Attention))
    assert layer.requirements == config.attention_requirements(str(dtype).removeprefix("torch."))
    assert layer.requirements.component == "vae"
    assert layer.requirements.is_auxiliary
    kernel = BACKEND.load(layer.requirements)
    shapes = []

    def seen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        assert q.dtype == dtype
        assert mask is None
        shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return kernel(q, k, v, scale=scale, causal=causal)

    layer.kernel = seen
    decoder.decode(torch.zeros(2, 4, 3, 2, 5, dtype=dtype))
    assert shapes == [((6, 10, 1, 32),) * 3]


@pytest.mark.parametrize(
    ("config", "factors", "stages"),
    [
        ({}, (8, 4), ((384, 384), (192, 384), (192, 192), (96, 96))),
        (PUBLISHED["Wan 2.2 5B"], (16, 4), ((1024, 1024), (1024, 1024), (1024, 512), (512, 256))),
        (CONFIGS["2.2-demo"], (8, 4), ((16, 16), (16, 16), (16, 8))),
        ({"_class_name": "AutoencoderKLWan", "temperal_downsample": [False, True, False]}, (8, 2), None),
    ],
)
def test_factors_and_stages(
    config: dict[str, Any], factors: tuple[int, int], stages: tuple[tuple[int, int], ...] | None
) -> None:
    read = WanVaeConfig.from_json(config)
    assert (read.spatial_factor, read.temporal_factor) == factors
    assert stages is None or read.decoder_stages == stages
    assert read.image_channels == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"latent_channels": 4, "act_fn": "silu"}, ["no act_fn, latent_channels", "base_dim"]),
        ({"z_dim": 0}, ["z_dim is 0", "at least 1"]),
        ({"z_dim": None}, ["z_dim is None"]),
        ({"base_dim": "96"}, ["base_dim is '96'"]),
        ({"patch_size": True}, ["patch_size is True", "or null"]),
        ({"dim_mult": []}, ["dim_mult is []"]),
        ({"dim_mult": [1, 2.0]}, ["dim_mult is [1, 2.0]"]),
        ({"temperal_downsample": [0, 1, 1]}, ["temperal_downsample is [0, 1, 1]", "true and false"]),
        ({"latents_std": 1.0}, ["latents_std is 1.0", "a list of numbers"]),
        ({"is_residual": "no", "dropout": None}, ["is_residual is 'no'", "dropout is None"]),
        ({"temperal_downsample": [True], "z_dim": 5}, ["has 1 entries", "must have 3", "latents_mean", "latents_std"]),
        ({"patch_size": 2}, ["out_channels is 3", "multiple of 4"]),
        ({"scale_factor_spatial": 16}, ["scale_factor_spatial is 16", "make it 8"]),
        ({"scale_factor_temporal": 8}, ["scale_factor_temporal is 8", "make it 4"]),
        ({"is_residual": True, "dim_mult": [1, 1, 2, 6], "temperal_downsample": [False] * 3}, ["from 48 to 16", "x4"]),
    ],
)
def test_a_config_that_is_no_wan_vae_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        WanVaeConfig.from_json({**WAN_2_1, **changes}, "some/vae/config.json")
    message = str(caught.value)
    assert message.startswith("some/vae/config.json: ")
    assert [word for word in words if word not in message] == []
