"""The UMT5 encoder against transformers' UMT5EncoderModel, and the rules for its text states."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from safelight.attention.backends.sdpa import BACKEND
from safelight.attention.layer import Attention
from safelight.errors import CheckpointError
from safelight.models.umt5 import TIED, Umt5Encoder, encode_prompts, position_buckets, weight_dtype
from safelight.models.umt5_config import Umt5Config
from safelight.text import Tokenizer, clean_prompt
from safelight.weights.files import find_weights
from safelight.weights.loading import load_module

parity = pytest.mark.parity

# The inner width, num_heads * d_kv, need not be d_model, 32.
SHAPES: dict[str, dict[str, Any]] = {
    "gated": {"num_heads": 4, "d_kv": 8, "feed_forward_proj": "gated-gelu"},
    "wide": {"num_heads": 3, "d_kv": 16, "feed_forward_proj": "gated-gelu"},
    "narrow": {"num_heads": 2, "d_kv": 8, "feed_forward_proj": "relu"},
    "few-buckets": {"d_kv": 16, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
}
TINY: dict[str, Any] = {
    "model_type": "umt5",
    "vocab_size": 40,
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    # Some of the dozens that transformers writes and that don't shape the encoder.
    "architectures": ["UMT5EncoderModel"],
    "dropout_rate": 0.1,
    "is_encoder_decoder": True,
    "tie_word_embeddings": False,
    "transformers_version": "5.0.0",
}


def reference_model(**changes: Any) -> Any:
    """transformers' encoder with weights that make every part count: no norm is one, no bias is nearly zero."""
    from transformers import UMT5Config, UMT5EncoderModel

    model = UMT5EncoderModel(UMT5Config(**{**TINY, **changes})).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            elif "relative_attention_bias" in name or "shared" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * 1.5 / weight.shape[1] ** 0.5)
    return model


def bound(encoder: Umt5Encoder) -> Umt5Encoder:
    """The encoder with torch's kernel in every attention layer."""
    assert BACKEND.load is not None
    for layer in encoder.modules():
        if isinstance(layer, Attention):
            layer.backend, layer.kernel = BACKEND, BACKEND.load(layer.requirements)
    return encoder.eval()


def ours_like(model: Any, dtype: str = "float32") -> Umt5Encoder:
    """Our encoder with the weights, dtypes included, of transformers'."""
    encoder = Umt5Encoder(Umt5Config.from_json(model.config.to_dict()), dtype)
    encoder.load_state_dict(model.state_dict(), assign=True)
    return bound(encoder)


def random_encoder() -> Umt5Encoder:
    torch.manual_seed(3)
    return bound(Umt5Encoder(Umt5Config.from_json(TINY)))


def assert_equal(ours: Tensor, right: Tensor) -> None:
    """Equal within 1e-5 of the right values' scale."""
    assert ours.shape == right.shape and ours.dtype == right.dtype == torch.float32
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-5 * float(right.abs().max()))


def random_ids(*shape: int) -> Tensor:
    return torch.randint(2, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(sum(shape)))


def padded(prompts: Sequence[Sequence[int]], length: int, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids [batch, length] and key padding of prompts of different lengths."""
    ids = torch.tensor([[*prompt, *[filler] * (length - len(prompt))] for prompt in prompts])
    return ids, torch.arange(length)[None] < torch.tensor([len(prompt) for prompt in prompts])[:, None]


# Against transformers


@parity
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_keys_and_shapes_equal_transformers(shape: dict[str, Any], tie: bool) -> None:
    theirs = reference_model(**shape, tie_word_embeddings=tie).state_dict()
    ours = Umt5Encoder(Umt5Config.from_json({**TINY, **shape, "tie_word_embeddings": tie})).state_dict()

    assert {key: weight.shape for key, weight in ours.items()} == {key: weight.shape for key, weight in theirs.items()}


@parity
def test_keys_and_shapes_equal_transformers_at_the_published_size() -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    xxl = {**TINY, "vocab_size": 256384, "d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "d_kv": 64}
    with torch.device("meta"):
        theirs = UMT5EncoderModel(UMT5Config(**xxl)).state_dict()
        ours = Umt5Encoder(Umt5Config.from_json(xxl)).state_dict()

    assert {key: weight.shape for key, weight in ours.items()} == {key: weight.shape for key, weight in theirs.items()}


@parity
@torch.inference_mode()
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [1, 2, 7, 40, 150])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_states_equal_transformers(shape: dict[str, Any], length: int, attention: str, tie: bool) -> None:
    model = reference_model(**shape, tie_word_embeddings=tie, attn_implementation=attention)
    ids = random_ids(2, length)
    right = model(ids).last_hidden_state

    assert right.std() > 0.3
    assert_equal(ours_like(model)(ids), right)


@parity
@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_masked_states_equal_transformers_at_every_position(shape: dict[str, Any]) -> None:
    model = reference_model(**shape)
    ids, key_padding = padded([random_ids(12).tolist(), random_ids(3).tolist(), [1]], 12)
    right = model(ids, key_padding.long()).last_hidden_state

    assert (right - model(ids).last_hidden_state).abs().max() > 0.1
    assert_equal(ours_like(model)(ids, key_padding), right)


@parity
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (4, 2), (5, 9), (64, 1000)])
def test_buckets_equal_transformers(num_buckets: int, max_distance: int) -> None:
    from transformers import UMT5Config
    from transformers.models.umt5.modeling_umt5 import UMT5Attention

    config = UMT5Config(relative_attention_num_buckets=num_buckets, relative_attention_max_distance=max_distance)
    positions = torch.arange(1300)
    right = UMT5Attention(config)._relative_position_bucket(positions[None] - positions[:, None])

    assert torch.equal(position_buckets(1300, num_buckets, max_distance, torch.device("cpu")), right)


@parity
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_weight_is_held_as_transformers_holds_it(tmp_path: Path, dtype: str) -> None:
    from transformers import UMT5EncoderModel

    reference_model().save_pretrained(str(tmp_path))
    model = UMT5EncoderModel.from_pretrained(str(tmp_path), dtype=getattr(torch, dtype))

    right = {key: weight.dtype for key, weight in model.state_dict().items()}
    assert {key: getattr(torch, weight_dtype(key, dtype)) for key in right} == right


@parity
@torch.inference_mode()
@pytest.mark.parametrize("feed_forward", ["gated-gelu", "relu"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.01)])
def test_half_precision_is_as_close_as_transformers(
    tmp_path: Path, dtype: str, tolerance: float, feed_forward: str
) -> None:
    from transformers import UMT5EncoderModel

    exact = reference_model(feed_forward_proj=feed_forward)
    exact.save_pretrained(str(tmp_path))
    model = UMT5EncoderModel.from_pretrained(str(tmp_path), dtype=getattr(torch, dtype))
    ids = random_ids(2, 20)
    truth, right, ours = exact(ids).last_hidden_state, model(ids).last_hidden_state, ours_like(model, dtype)(ids)

    assert ours.dtype == right.dtype == getattr(torch, dtype)
    assert (ours - truth).abs().max() <= 1.5 * (right - truth).abs().max() + 1e-3
    torch.testing.assert_close(ours, right, rtol=0, atol=tolerance)


@parity
@torch.inference_mode()
def test_a_float16_stream_that_overflows_stays_finite_as_in_transformers() -> None:
    model = reference_model(num_layers=1).half()
    model.encoder.block[0].layer[0].SelfAttention.o.weight.mul_(60_000)
    ids = random_ids(1, 6)
    right = model(ids).last_hidden_state

    assert right.isfinite().all()
    torch.testing.assert_close(ours_like(model, "float16")(ids), right, rtol=0, atol=0.02)


# Prompts of different lengths


@torch.inference_mode()
def test_rows_of_a_padded_batch_equal_the_single_runs() -> None:
    encoder = random_encoder()
    prompts = [random_ids(length).tolist() for length in (9, 1, 4)]
    ids, key_padding = padded(prompts, 9)
    batch = encoder(ids, key_padding)

    for states, prompt in zip(batch, prompts, strict=True):
        assert_equal(states[: len(prompt)], encoder(torch.tensor([prompt]))[0])


@torch.inference_mode()
def test_dx_011_junk_in_the_padded_tail_changes_nothing() -> None:
    encoder = random_encoder()
    prompts = [random_ids(3).tolist(), random_ids(7).tolist()]
    clean, junk = (encoder(*padded(prompts, 16, filler=filler)) for filler in (0, 39))

    assert torch.equal(clean[0, :3], junk[0, :3])
    assert torch.equal(clean[1, :7], junk[1, :7])
    assert not torch.equal(clean[0, 3:], junk[0, 3:])


@torch.inference_mode()
def test_dx_011_states_past_the_prompt_are_exactly_zero() -> None:
    encoder = random_encoder()
    prompts = [random_ids(length).tolist() for length in (3, 16, 1, 3)]
    states = encode_prompts(encoder, prompts, 16)

    assert states.shape == (4, 16, TINY["d_model"])
    for row, prompt in zip(states, prompts, strict=True):
        alone = encoder(torch.tensor([prompt]))[0]
        assert torch.equal(row[: len(prompt)], alone), "a prompt's states depend on its company"
        assert alone.abs().sum(-1).min() > 0
        assert row[len(prompt) :].eq(0).all()


@torch.inference_mode()
def test_a_prompt_without_tokens_is_all_zero() -> None:
    assert encode_prompts(random_encoder(), [[], [1]], 4)[0].eq(0).all()


@torch.inference_mode()
def test_the_kernel_gets_no_padding_from_encode_prompts() -> None:
    encoder = random_encoder()
    seen: list[tuple[int, ...]] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, scale: float, **rest: object) -> Tensor:
        seen.append((q.shape[0], q.shape[1], k.shape[1], *mask.shape))
        assert scale == 1.0
        return v

    for layer in encoder.modules():
        if isinstance(layer, Attention):
            layer.kernel = recording
    encode_prompts(encoder, [[3, 4, 5], [6]], 512)

    assert seen == [(1, 3, 3, 1, 4, 3, 3)] * 2 + [(1, 1, 1, 1, 4, 1, 1)] * 2


# A whole text path against diffusers

WORDS = ("<pad>", "</s>", "<unk>", "a", "red", "blue", "circle", "moving", "right", "b", "&")


def write_tokenizer(folder: Path) -> Path:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Punctuation()]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair=None, special_tokens=[("</s>", 1)]
    )
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": "<unk>"}), encoding="utf-8")
    return folder


@parity
@torch.inference_mode()
@pytest.mark.parametrize("max_length", [4, 16])
def test_dx_011_text_states_equal_the_wan_pipelines(tmp_path: Path, max_length: int) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline
    from transformers import AutoTokenizer

    folder, model = write_tokenizer(tmp_path / "tokenizer"), reference_model()
    pipeline = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(str(folder)),
        text_encoder=model,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    prompts = ["A red  circle", "", "a &amp; b", "blue circle moving right, a red circle moving right, a blue one"]
    right, _ = pipeline.encode_prompt(
        prompts, do_classifier_free_guidance=False, max_sequence_length=max_length, device=torch.device("cpu")
    )
    tokenizer = Tokenizer.from_folder(folder)
    ids = [tokenizer.encode(clean_prompt(prompt), max_length).prompt_ids for prompt in prompts]
    states = encode_prompts(ours_like(model), ids, max_length)

    assert_equal(states, right)
    assert torch.equal(states.eq(0).all(-1), right.eq(0).all(-1))


@torch.inference_mode()
def test_dx_065_prompts_count_up_to_the_limit_and_no_further(tmp_path: Path) -> None:
    tokenizer, encoder = Tokenizer.from_folder(write_tokenizer(tmp_path / "tokenizer")), random_encoder()

    def states(num_words: int, last: str, max_length: int) -> Tensor:
        prompt = tokenizer.encode(" ".join(["a"] * (num_words - 1) + [last]), max_length)
        return encode_prompts(encoder, [prompt.prompt_ids], max_length)

    for max_length in (16, 80):
        for num_words in (10, 15, 16, 77, 78, 79, 80, 600):
            is_equal = torch.equal(states(num_words, "red", max_length), states(num_words, "blue", max_length))
            assert is_equal == (num_words >= max_length), (num_words, max_length)


# One embedding under two names

NAMES = TIED[0]


def loaded(folder: Path, tie: bool) -> Umt5Encoder:
    """The encoder with the weights of a folder, as the pipeline loads it."""
    with torch.device("meta"):
        encoder = Umt5Encoder(Umt5Config.from_json({**TINY, "tie_word_embeddings": tie}))
    load_module(encoder, find_weights(folder, stem="model"), dtype=torch.float32, device="cpu", tied=TIED)
    return bound(encoder)


@parity
@torch.inference_mode()
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("held", [NAMES[:1], NAMES[1:], NAMES], ids=["shared", "embed_tokens", "both"])
def test_dx_028_either_name_fills_both(tmp_path: Path, held: tuple[str, ...], tie: bool) -> None:
    model = reference_model(tie_word_embeddings=tie)
    state = {key: weight for key, weight in model.state_dict().items() if key not in NAMES or key in held}
    save_file({key: weight.clone() for key, weight in state.items()}, tmp_path / "model.safetensors")
    encoder = loaded(tmp_path, tie)

    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    assert torch.equal(encoder.encoder.embed_tokens.weight, model.shared.weight)
    one, other = torch.tensor([[4, 5, 1]]), torch.tensor([[6, 7, 1]])
    assert not torch.allclose(encoder(one), encoder(other))
    assert_equal(encoder(one), model(one).last_hidden_state)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_dx_028_an_embedding_that_is_missing_or_doubtful_stops_the_load(tmp_path: Path, tie: bool) -> None:
    state = {key: weight.clone() for key, weight in random_encoder().state_dict().items()}
    without = {key: weight for key, weight in state.items() if key not in NAMES}
    doubtful = {**state, NAMES[1]: torch.zeros_like(state[NAMES[1]])}

    for stored in (without, doubtful):
        save_file(stored, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            loaded(tmp_path, tie)
        assert all(name in caught.value.message for name in NAMES)


def test_dx_028_the_two_names_are_one_parameter() -> None:
    encoder = Umt5Encoder(Umt5Config.from_json(TINY))

    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    assert all(set(names) <= set(encoder.state_dict()) for names in TIED)
    assert sum(weight.numel() for weight in encoder.parameters()) < sum(
        weight.numel() for weight in encoder.state_dict().values()
    )


# The configuration


def test_the_config_keeps_what_shapes_the_encoder() -> None:
    config = Umt5Config.from_json(TINY)

    assert dataclasses.asdict(config) == {key: TINY[key] for key in dataclasses.asdict(config)}
    assert config.is_gated
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 64  # type: ignore[misc]


def test_the_config_says_what_attention_needs() -> None:
    requirements = Umt5Config.from_json({**TINY, "num_heads": 3, "d_kv": 16}).attention_requirements("bfloat16")

    assert requirements.to_json() == {
        "head_dim": 16,
        "dtype": "bfloat16",
        "num_heads": 3,
        "num_kv_heads": 3,
        "role": "self",
        "component": "text_encoder",
        "is_auxiliary": True,
        "causal": False,
        "mask": "bias",
        "packed_varlen": False,
        "needs_lse": False,
        "scale": 1.0,
        "equal_lengths": True,
        "replicated_keys": False,
    }
    config = Umt5Config.from_json(TINY)
    layers = [layer for layer in Umt5Encoder(config, "float16").modules() if isinstance(layer, Attention)]
    assert [layer.requirements for layer in layers] == [config.attention_requirements("float16")] * 2


@parity
def test_the_config_that_transformers_writes_is_read(tmp_path: Path) -> None:
    from transformers import UMT5Config

    UMT5Config(num_heads=5, tie_word_embeddings=False).save_pretrained(str(tmp_path))
    config = Umt5Config.from_json(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))

    assert (config.num_heads, config.d_model, config.num_layers, config.vocab_size) == (5, 512, 8, 250112)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Umt5Config)])
def test_a_needed_key_that_is_missing_is_named(name: str) -> None:
    config = {key: value for key, value in TINY.items() if key != name}
    with pytest.raises(CheckpointError, match=f"^over there/config.json: {name} is missing$"):
        Umt5Config.from_json(config, source="over there/config.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "t5"}, "model_type is 't5'; this text encoder must be \"umt5\""),
        ({"model_type": None}, "model_type is None"),
        ({"d_model": 0}, "d_model is 0; it must be a whole number of at least 1"),
        ({"num_layers": "2"}, "num_layers is '2'"),
        ({"num_heads": True}, "num_heads is True"),
        ({"layer_norm_epsilon": "1e-6"}, "layer_norm_epsilon is '1e-6'"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0"),
        ({"feed_forward_proj": "gated-silu"}, "is 'gated-silu'; it must be one of ['gated-gelu', 'relu']"),
        ({"feed_forward_proj": ["relu"]}, "feed_forward_proj is ['relu']"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets is 3; it must be at least 4"),
        ({"relative_attention_max_distance": 8}, "with 32 buckets it must be above 8"),
        ({"dense_act_fn": "silu"}, "is 'silu'; with feed_forward_proj 'gated-gelu' it must be 'gelu_new'"),
        ({"is_gated_act": False}, "is_gated_act is False"),
        ({"is_decoder": True}, "is_decoder is True"),
    ],
)
def test_a_config_for_something_else_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Umt5Config.from_json({**TINY, **changes})
    assert says in caught.value.message
    assert caught.value.message.startswith("text_encoder/config.json: ")


def test_everything_wrong_with_a_config_is_said_at_once() -> None:
    with pytest.raises(CheckpointError) as caught:
        Umt5Config.from_json({**TINY, "d_kv": -1, "vocab_size": None, "feed_forward_proj": "selu"})
    assert all(name in caught.value.message for name in ("d_kv", "vocab_size", "feed_forward_proj"))


def test_reading_the_config_imports_no_torch() -> None:
    code = "import sys, safelight.models.umt5_config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
