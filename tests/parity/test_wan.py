"""The Wan transformer against diffusers' WanTransformer3DModel, and its configuration's checks."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from safelight.errors import CheckpointError
from safelight.models.wan import WanTransformer, keeps_float32
from safelight.models.wan_config import WanConfig
from safelight.weights.files import find_weights
from safelight.weights.loading import load_module
from tests.wan_reference import (
    TINY,
    bind_sdpa,
    draw_config,
    native_transformer,
    random_inputs,
    reference_transformer,
    relative_error,
    velocity,
)

parity = pytest.mark.parity

TOLERANCE = 1e-5  # of the largest output
LENGTH = 512

# Prompts' lengths, one for each row of a batch: none, some, all but one, all.
TEXTS = ([0], [1], [511], [512], [3, 9], [0, 512], [17, 0, 512], [7, 7, 300])

PUBLISHED: dict[str, dict[str, Any]] = {
    "Wan 2.1 1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30, "in_channels": 16},
    "Wan 2.1 14B": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40, "in_channels": 16},
    "Wan 2.2 5B": {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48},
}


@torch.no_grad()
def reference_velocity(reference: Any, latents: Tensor, timesteps: Tensor, states: Tensor) -> Tensor:
    return reference(latents, timesteps, states, return_dict=False)[0]


def timesteps_for(states: Tensor) -> Tensor:
    return torch.tensor([999.0, 500.25, 1.0])[: len(states)]


@parity
@pytest.mark.parametrize("seed", range(24))
def test_any_tiny_model_gives_the_reference_s_velocity(seed: int) -> None:
    draw = random.Random(seed)
    reference = reference_transformer(seed, **draw_config(seed))
    model = native_transformer(reference, merges_zero_rows=draw.choice([True, False]), fused=draw.choice([True, False]))
    grid = (draw.randint(1, 3), draw.randint(1, 5), draw.randint(1, 7))
    length = draw.choice([1, 16, LENGTH])
    num_tokens = [draw.randint(0, length) for _ in range(draw.randint(1, 3))]
    latents, states = random_inputs(reference.config, grid, num_tokens, length, seed)
    timesteps = torch.tensor([draw.uniform(0, 1000) for _ in num_tokens])

    found = velocity(model, latents, timesteps, model.text_context(states, num_tokens, length))

    assert relative_error(found, reference_velocity(reference, latents, timesteps, states)) <= TOLERANCE


@parity
@pytest.mark.parametrize("merges", [True, False], ids=["merged", "unmerged"])
@pytest.mark.parametrize("num_tokens", TEXTS, ids=str)
def test_texts_of_every_length_give_the_reference_s_velocity(num_tokens: list[int], merges: bool) -> None:
    reference = reference_transformer()
    model = native_transformer(reference, merges_zero_rows=merges)
    latents, states = random_inputs(reference.config, (2, 3, 5), num_tokens, LENGTH)
    timesteps = timesteps_for(states)
    text = model.text_context(states, num_tokens, LENGTH)

    found = velocity(model, latents, timesteps, text)

    assert relative_error(found, reference_velocity(reference, latents, timesteps, states)) <= TOLERANCE
    keys = min(max(num_tokens) + 1, LENGTH) if merges else LENGTH
    assert [tuple(k.shape[:2]) for k in text.keys] == [(len(num_tokens), keys)] * 2
    assert (text.bias is not None) == (keys < LENGTH)


@parity
@pytest.mark.parametrize("patch", [[1, 2, 2], [1, 1, 1], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 7, 3), (5, 3, 7), (4, 8, 2)], ids=str)
def test_grids_and_patches_give_the_reference_s_velocity(grid: tuple[int, int, int], patch: list[int]) -> None:
    reference = reference_transformer(patch_size=patch, attention_head_dim=64)
    model = native_transformer(reference, fused=True)
    latents, states = random_inputs(reference.config, grid, [5, 2], LENGTH)
    timesteps = timesteps_for(states)

    found = velocity(model, latents, timesteps, model.text_context(states, [5, 2], LENGTH))

    assert found.shape == latents.shape
    assert relative_error(found, reference_velocity(reference, latents, timesteps, states)) <= TOLERANCE


@parity
def test_the_steps_modulations_are_those_of_their_timesteps() -> None:
    reference = reference_transformer()
    model = native_transformer(reference)
    latents, states = random_inputs(reference.config, (2, 3, 4), [4, 1], LENGTH)
    text = model.text_context(states, [4, 1], LENGTH)
    timesteps = torch.tensor([1000.0, 700.5, 3.0])

    for timestep, modulation in zip(timesteps, model.modulations(timesteps), strict=True):
        found = model(latents, modulation, text, model.rotary((2, 3, 4)))
        expected = reference_velocity(reference, latents, timestep.expand(2), states)
        assert relative_error(found, expected) <= TOLERANCE


@parity
def test_rows_with_timesteps_of_their_own() -> None:
    reference = reference_transformer()
    model = native_transformer(reference)
    latents, states = random_inputs(reference.config, (2, 3, 4), [4, 1, 9], LENGTH)
    timesteps = torch.tensor([999.0, 1.0, 400.0])
    text = model.text_context(states, [4, 1, 9], LENGTH)

    found = velocity(model, latents, timesteps, text)

    assert relative_error(found, reference_velocity(reference, latents, timesteps, states)) <= TOLERANCE
    shared = velocity(model, latents, torch.full((3,), 999.0), text)
    assert relative_error(shared[1], found[1]) > 0.01, "the timestep must matter for this test to say anything"


def test_a_row_doesn_t_depend_on_its_company() -> None:
    model = native_transformer(reference_transformer())
    latents, states = random_inputs(model.config, (2, 3, 4), [4, 500, 9], LENGTH)
    timesteps = timesteps_for(states)
    together = velocity(model, latents, timesteps, model.text_context(states, [4, 500, 9], LENGTH))

    for i, tokens in enumerate([4, 500, 9]):
        text = model.text_context(states[i : i + 1], [tokens], LENGTH)
        alone = velocity(model, latents[i : i + 1], timesteps[i : i + 1], text)
        assert relative_error(together[i : i + 1], alone) <= TOLERANCE


def test_dx_011_what_lies_past_a_prompt_s_end_changes_nothing() -> None:
    model = native_transformer(reference_transformer())
    latents, states = random_inputs(model.config, (2, 3, 4), [4, 4], LENGTH)
    timesteps = timesteps_for(states)
    clean = velocity(model, latents, timesteps, model.text_context(states, [4, 4], LENGTH))
    states[:, 4:] = 1e6

    assert torch.equal(velocity(model, latents, timesteps, model.text_context(states, [4, 4], LENGTH)), clean)


def test_fusing_keeps_names_values_and_memory() -> None:
    reference = reference_transformer()
    plain, fused = native_transformer(reference), native_transformer(reference, fused=True)
    latents, states = random_inputs(plain.config, (2, 3, 4), [4], LENGTH)
    timesteps = timesteps_for(states)

    assert list(fused.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in fused.state_dict().items())
    stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in fused.parameters()}
    assert sum(stored.values()) == sum(p.nbytes for p in plain.parameters())
    found, expected = (
        velocity(model, latents, timesteps, model.text_context(states, [4], LENGTH)) for model in (fused, plain)
    )
    assert relative_error(found, expected) <= TOLERANCE


def test_text_projections_run_once_however_many_steps_follow() -> None:
    model = native_transformer(reference_transformer())
    latents, states = random_inputs(model.config, (2, 3, 4), [4], LENGTH)
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, out, name=name: calls.update([name]))

    text = model.text_context(states, [4], LENGTH)
    modulations = model.modulations(torch.arange(5.0))
    rotary = model.rotary((2, 3, 4))
    for modulation in modulations:
        model(latents, modulation, text, rotary)

    for once in (
        "condition_embedder.text_embedder",
        "condition_embedder.time_embedder",
        "condition_embedder.time_proj",
    ):
        assert calls[once] == 1
    for block in ("blocks.0", "blocks.1"):
        assert {part: calls[f"{block}.attn2.{part}"] for part in ("to_k", "to_v", "to_q", "to_out.0")} == {
            "to_k": 1,
            "to_v": 1,
            "to_q": 5,
            "to_out.0": 5,
        }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_merged_rows_weigh_as_many_as_they_are(dtype: torch.dtype) -> None:
    model = native_transformer(reference_transformer(num_layers=1)).to(dtype)
    num_tokens = list(range(LENGTH - 2))
    bias = model.text_context(torch.zeros(len(num_tokens), 1, TINY["text_dim"]), num_tokens, LENGTH).bias

    assert bias is not None and bias.dtype == dtype
    weights = bias[:, 0, 0].double().exp().sum(1)
    # A sixteenth of what one number of bfloat16 can err by; in float32, its own precision.
    assert float((weights / LENGTH - 1).abs().max()) <= {torch.float32: 1e-6}.get(dtype, 5e-4)
    for tokens, row in zip(num_tokens, bias[:, 0, 0], strict=True):
        assert row[:tokens].eq(0).all() and row[tokens : max(num_tokens)].eq(-torch.inf).all()


@parity
@pytest.mark.parametrize("num_tokens", TEXTS, ids=str)
def test_bfloat16_errs_no_more_than_the_reference_does(num_tokens: list[int], tmp_path: Any) -> None:
    from diffusers import WanTransformer3DModel

    exact = reference_transformer(attention_head_dim=64, num_attention_heads=4)
    exact.save_pretrained(tmp_path)
    reference = WanTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = load_bfloat16(exact, tmp_path)
    latents, states = random_inputs(exact.config, (3, 5, 7), num_tokens, LENGTH)
    timesteps = timesteps_for(states)

    truth = reference_velocity(exact, latents, timesteps, states)
    half = states.bfloat16()
    theirs = relative_error(reference_velocity(reference, latents.bfloat16(), timesteps, half), truth)
    ours = relative_error(velocity(model, latents, timesteps, model.text_context(half, num_tokens, LENGTH)), truth)

    assert ours <= max(1.25 * theirs, 0.01)


def load_bfloat16(reference: Any, folder: Any) -> WanTransformer:
    with torch.device("meta"):
        model = WanTransformer(WanConfig.from_json(dict(reference.config)), torch.bfloat16)
    load_module(model, find_weights(folder), dtype=torch.bfloat16, device="cpu", keep_float32=keeps_float32)
    bind_sdpa(model)
    model.fuse()
    return model


def test_the_reference_s_float32_parts_stay_float32(tmp_path: Any) -> None:
    from diffusers import WanTransformer3DModel

    exact = reference_transformer()
    exact.save_pretrained(tmp_path)
    reference = WanTransformer3DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)

    found = {name: value.dtype for name, value in load_bfloat16(exact, tmp_path).state_dict().items()}

    assert found == {name: value.dtype for name, value in reference.state_dict().items()}
    assert set(found.values()) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_reference_s_keys_and_shapes(name: str) -> None:
    from diffusers import WanTransformer3DModel

    config = PUBLISHED[name] | {"attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256}
    config["out_channels"] = config["in_channels"]
    with torch.device("meta"):
        reference = WanTransformer3DModel(**config)
        model = WanTransformer(WanConfig.from_json(dict(reference.config)))

    found = {key: tuple(value.shape) for key, value in model.state_dict().items()}

    assert found == {key: tuple(value.shape) for key, value in reference.state_dict().items()}


@pytest.mark.parametrize("cross_attn_norm", [True, False])
def test_a_model_without_a_cross_norm_has_no_key_for_it(cross_attn_norm: bool) -> None:
    reference = reference_transformer(cross_attn_norm=cross_attn_norm)

    assert list(native_transformer(reference).state_dict()) == list(reference.state_dict())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": "4"}, "num_layers is '4'; it must be a whole number of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be"),
        ({"num_attention_heads": True}, "num_attention_heads is True; it must be"),
        ({"attention_head_dim": 63}, "attention_head_dim is 63; it must be even"),
        ({"freq_dim": 7}, "freq_dim is 7; it must be even"),
        ({"out_channels": -1}, "out_channels is -1; it must be"),
        ({"patch_size": [1, 2]}, "patch_size is [1, 2]; it must be three whole numbers"),
        ({"patch_size": 2}, "patch_size is 2; it must be three whole numbers"),
        ({"patch_size": [1, 2, 0]}, "patch_size is [1, 2, 0]"),
        ({"eps": 0}, "eps is 0; it must be a number between 0 and 1"),
        ({"cross_attn_norm": None}, "cross_attn_norm is None; it must be true or false"),
        ({"image_dim": 1280}, "image_dim is 1280; text-to-video Wan has None"),
        ({"added_kv_proj_dim": 5120}, "added_kv_proj_dim is 5120; text-to-video Wan has None"),
        ({"qk_norm": "layer_norm"}, "qk_norm is 'layer_norm'; text-to-video Wan has 'rms_norm_across_heads'"),
        ({"rope_max_seq_len": 0}, "rope_max_seq_len is 0; it must be"),
    ],
)
def test_a_wrong_configuration_is_refused_with_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        WanConfig.from_json(TINY | changes, "somewhere/config.json")

    assert caught.value.message.startswith("somewhere/config.json: ") and said in caught.value.message


def test_everything_wrong_with_a_configuration_is_said_at_once() -> None:
    config = {key: value for key, value in TINY.items() if key not in ("ffn_dim", "text_dim")}

    with pytest.raises(CheckpointError) as caught:
        WanConfig.from_json(config | {"eps": 2, "image_dim": 3})

    for said in ("ffn_dim is missing", "text_dim is missing", "eps is 2", "image_dim is 3"):
        assert said in caught.value.message


def test_a_configuration_that_leaves_things_out_gets_the_reference_s_defaults() -> None:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        whole = dict(WanTransformer3DModel(num_layers=1).config)
    optional = ("patch_size", "out_channels", "cross_attn_norm", "eps", "qk_norm", "rope_max_seq_len")
    short = {key: value for key, value in whole.items() if key not in optional}

    assert WanConfig.from_json(short) == WanConfig.from_json(whole)
