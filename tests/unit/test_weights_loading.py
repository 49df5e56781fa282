"""From files to a module: every key must match, every value must be the stored one, nothing is left uninitialised."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from safelight.errors import CheckpointError
from safelight.weights.files import find_weights
from safelight.weights.loading import load_module

STEM = "diffusion_pytorch_model"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(8, 16)
        self.norm2 = nn.LayerNorm(8)


class Tiny(nn.Module):
    """Blocks, a bare parameter, a persistent float and an integer buffer, and a buffer that no file holds."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 2, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("position_ids", torch.zeros(1, 5, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def init_buffers(self, device: torch.device) -> None:
        self.table = torch.arange(3, dtype=torch.float32, device=device)


def on_meta(make: Callable[[], nn.Module] = Tiny) -> nn.Module:
    with torch.device("meta"):
        return make()


def values(module: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Different numbers for every tensor of a module, each exact in every float dtype."""
    generator = torch.Generator().manual_seed(0)
    state = (module or on_meta()).state_dict()
    made = {name: torch.randint(-64, 64, tensor.shape, generator=generator) for name, tensor in state.items()}
    return {name: made[name].to(dtype if state[name].is_floating_point() else state[name].dtype) for name in made}


def write(folder: Path, tensors: dict[str, Tensor], num_shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if num_shards == 1:
        save_file(tensors, folder / f"{STEM}.safetensors")
        return folder
    weight_map = {}
    for number in range(num_shards):
        names = sorted(tensors)[number::num_shards]
        file = f"{STEM}-{number + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(folder: Path, module: nn.Module | None = None, **options: Any) -> nn.Module:
    module = on_meta() if module is None else module
    load_module(module, find_weights(folder), **{"dtype": torch.float32, "device": "cpu", **options})
    return module


def refusal(folder: Path, module: nn.Module | None = None, **options: Any) -> CheckpointError:
    """The refusal, after seeing that nothing was filled."""
    module = on_meta() if module is None else module
    with pytest.raises(CheckpointError) as caught:
        load(folder, module, **options)
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    return caught.value


def equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_value_is_the_stored_one(tmp_path: Path, num_shards: int) -> None:
    stored = values()
    module = load(write(tmp_path, stored, num_shards))
    assert module.state_dict().keys() == stored.keys()
    assert all(equal(tensor, stored[name]) for name, tensor in module.state_dict().items())
    assert module.table.tolist() == [0.0, 1.0, 2.0]
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())


def test_the_report_says_what_was_loaded(tmp_path: Path) -> None:
    stored = values()
    write(tmp_path, {**stored, "encoder.weight": torch.ones(1)}, 3)
    (tmp_path / "old.bin").write_bytes(b"pickle")
    report = load_module(
        on_meta(), find_weights(tmp_path), dtype=torch.bfloat16, device="cpu", skip_prefixes=("encoder.",)
    )
    numbers = sum(tensor.numel() for tensor in stored.values())
    assert [file.name for file in report.files] == [f"{STEM}-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert report.num_tensors == len(stored)
    assert report.memory_bytes == 2 * (numbers - 5) + 8 * 5
    assert report.skipped == ("encoder.weight",)
    assert report.notes == ("old.bin is ignored: pickle files are never opened",)
    assert report.tied == report.dequantised == ()


@pytest.mark.slow
def test_dx_017_two_loads_in_fresh_processes_are_identical(tmp_path: Path) -> None:
    write(
        tmp_path,
        {name: torch.randn_like(tensor) if tensor.is_floating_point() else tensor for name, tensor in values().items()},
        3,
    )
    program = (
        "import sys, hashlib, torch\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_weights_loading import load, Tiny\n"
        "state = load(Path(sys.argv[2]), dtype=torch.bfloat16, keep_float32=('norm2',)).state_dict()\n"
        "for name, tensor in state.items():\n"
        "    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()\n"
        "    print(name, tensor.dtype, hashlib.sha256(data).hexdigest())\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert len(first.splitlines()) == len(values())
    assert first == second


# Keys and shapes.


def test_dx_017_a_dropped_bias_is_missing(tmp_path: Path) -> None:
    stored = values()
    del stored["blocks.1.to_q.bias"]
    error = refusal(write(tmp_path, stored))
    assert error.details == {"missing": ["blocks.1.to_q.bias"]}
    assert "1 missing: blocks.1.to_q.bias" in error.message
    assert str(tmp_path / f"{STEM}.safetensors") in error.message
    assert "Tiny" in error.message


def test_dx_017_a_renamed_block_is_missing_and_unexpected(tmp_path: Path) -> None:
    stored = {name.replace("blocks.1.", "block.1."): tensor for name, tensor in values().items()}
    details = refusal(write(tmp_path, stored)).details
    ends = ("norm2.bias", "norm2.weight", "to_q.bias", "to_q.weight")
    assert sorted(details["missing"]) == [f"blocks.1.{end}" for end in ends]
    assert details["unexpected"] == [f"block.1.{end}" for end in ends]


def test_dx_017_an_unknown_tensor_is_unexpected(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, {**values(), "blocks.0.gate": torch.ones(1)}))
    assert error.details == {"unexpected": ["blocks.0.gate"]}


def test_dx_017_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    stored = values()
    stored["blocks.0.to_q.weight"] = stored["blocks.0.to_q.weight"].T.contiguous()
    details = refusal(write(tmp_path, stored)).details
    assert details == {"misshapen": ["blocks.0.to_q.weight is [8, 16] in the file and [16, 8] in the model"]}


def test_dx_017_too_few_layers_in_the_file(tmp_path: Path) -> None:
    details = refusal(write(tmp_path, values(Tiny(2)))).details
    assert details.keys() == {"missing"}
    assert all(name.startswith("blocks.2.") for name in details["missing"])
    assert len(details["missing"]) == 4


def test_dx_017_everything_wrong_is_said_at_once_and_long_lists_are_cut(tmp_path: Path) -> None:
    stored = values(Tiny(20))
    stored["mean"] = torch.ones(5)
    del stored["scale_shift_table"]
    error = refusal(write(tmp_path, stored))
    assert {title: len(items) for title, items in error.details.items()} == {
        "missing": 1,
        "unexpected": 17 * 4,
        "misshapen": 1,
    }
    assert "and 60 more" in error.message
    assert len(error.message) < 1500


def test_dx_016_a_broken_shard_stops_the_load(tmp_path: Path) -> None:
    write(tmp_path, values(), 3)
    shard = tmp_path / f"{STEM}-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert refusal(tmp_path).message.startswith(f"{shard}: truncated: ")


def test_dx_016_an_extra_shard_changes_nothing(tmp_path: Path) -> None:
    stored = values()
    write(tmp_path, stored, 3)
    save_file({name: tensor + 1 for name, tensor in stored.items()}, tmp_path / f"{STEM}-00004-of-00004.safetensors")
    assert all(equal(tensor, stored[name]) for name, tensor in load(tmp_path).state_dict().items())


def test_skipped_prefixes_are_of_the_files_names(tmp_path: Path) -> None:
    stored = {f"decoder.{name}": tensor for name, tensor in values().items()}
    stored["encoder.to_q.weight"] = torch.ones(2)
    write(tmp_path, stored)
    options = {"skip_prefixes": ("encoder.", "quant_conv."), "rename": lambda name: name.removeprefix("decoder.")}
    module = load(tmp_path, **options)
    assert equal(module.mean, stored["decoder.mean"])
    assert refusal(tmp_path, rename=options["rename"]).details == {"unexpected": ["encoder.to_q.weight"]}


def test_a_rename_that_brings_two_keys_together_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {**values(), "old.mean": torch.ones(4)})
    details = refusal(tmp_path, rename=lambda name: name.removeprefix("old.")).details
    assert details == {"unexpected": ["old.mean (becomes mean, as mean does)"]}


# Dtypes.


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32])
def test_floats_are_cast_and_integers_kept(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    stored = values(dtype=source)
    module = load(write(tmp_path, stored), dtype=target, keep_float32=("norm2", "scale_shift_table"))
    for name, tensor in module.state_dict().items():
        is_kept = "norm2" in name or name == "scale_shift_table"
        wanted = torch.int64 if name == "position_ids" else torch.float32 if is_kept else target
        assert equal(tensor, stored[name].to(wanted)), name


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), set()),
        (("norm2",), {"blocks.0.norm2.weight", "blocks.0.norm2.bias"}),
        (("norm",), set()),
        (("blocks.0",), {f"blocks.0.{end}" for end in ("norm2.weight", "norm2.bias", "to_q.weight", "to_q.bias")}),
        (("norm2.bias", "mean"), {"blocks.0.norm2.bias", "mean"}),
        (lambda name: name.endswith("q.bias"), {"blocks.0.to_q.bias"}),
    ],
    ids=["nothing", "a module", "part of a word", "two parts", "two patterns", "a predicate"],
)
def test_keep_float32_matches_whole_parts_of_the_name(tmp_path: Path, keep: Any, kept: set[str]) -> None:
    module = load(write(tmp_path, values(Tiny(1))), on_meta(lambda: Tiny(1)), dtype=torch.bfloat16, keep_float32=keep)
    assert {name for name, tensor in module.state_dict().items() if tensor.dtype == torch.float32} == kept


@pytest.mark.parametrize(
    ("name", "dtype", "problem"),
    [
        ("blocks.0.to_q.weight", torch.int8, "blocks.0.to_q.weight is I8: quantised weights aren't supported"),
        ("blocks.0.to_q.weight", torch.uint8, "blocks.0.to_q.weight is U8: quantised"),
        ("blocks.0.to_q.weight", torch.complex64, "blocks.0.to_q.weight is C64: quantised"),
        ("position_ids", torch.int32, "position_ids is I32 in the file and I64 in the model"),
        ("position_ids", torch.float32, "position_ids is F32 in the file and I64 in the model"),
    ],
)
def test_a_dtype_that_would_change_the_values_is_refused(
    tmp_path: Path, name: str, dtype: torch.dtype, problem: str
) -> None:
    stored = values()
    stored[name] = stored[name].to(dtype)
    details = refusal(write(tmp_path, stored)).details
    assert details.keys() == {"unsupported"}
    assert details["unsupported"][0].startswith(problem)


# Float8.

WEIGHT = "blocks.0.to_q.weight"
FLOAT8 = {torch.float8_e4m3fn: (448.0, 2**-4), torch.float8_e5m2: (57344.0, 2**-3)}


def quantised(dtype: torch.dtype, scale_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, its float8 form and the scale."""
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 3, 16)[:, None]
    largest = weight.abs().amax(dim=1, keepdim=True) if 16 in scale_shape else weight.abs().amax()
    scale = largest / FLOAT8[dtype][0]
    return weight, (weight / scale).to(dtype), scale.reshape(scale_shape)


@pytest.mark.parametrize("spelling", ["weight_scale", "scale_weight"])
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("scale_shape", [(), (1,), (16,), (16, 1)], ids=str)
def test_dx_014_float8_weights_are_multiplied_by_their_scale(
    tmp_path: Path, spelling: str, dtype: torch.dtype, scale_shape: tuple[int, ...]
) -> None:
    weight, stored_weight, scale = quantised(dtype, scale_shape)
    stored = {**values(), WEIGHT: stored_weight, f"blocks.0.to_q.{spelling}": scale}
    write(tmp_path, stored, 3)
    module = on_meta()
    report = load_module(module, find_weights(tmp_path), dtype=torch.float32, device="cpu")
    found = module.state_dict()[WEIGHT]
    assert found.dtype == torch.float32
    assert torch.equal(
        found, stored_weight.float() * scale.reshape(-1, 1) if scale.numel() > 1 else stored_weight.float() * scale
    )
    assert ((found - weight).abs() <= FLOAT8[dtype][1] * weight.abs() + 1e-3).all()
    assert report.dequantised == (WEIGHT,)
    assert report.skipped == ()
    assert load(tmp_path, dtype=torch.bfloat16).state_dict()[WEIGHT].dtype == torch.bfloat16


def test_dx_014_scales_of_activations_are_skipped_not_unexpected(tmp_path: Path) -> None:
    _, stored_weight, scale = quantised(torch.float8_e4m3fn, ())
    names = ("blocks.0.to_q.scale_input", "blocks.0.to_q.input_scale")
    stored = {**values(), WEIGHT: stored_weight, "blocks.0.to_q.scale_weight": scale}
    write(tmp_path, {**stored, **{name: torch.ones(1) for name in names}})
    report = load_module(on_meta(), find_weights(tmp_path), dtype=torch.float32, device="cpu")
    assert report.skipped == tuple(sorted(names))


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        ({}, "its scale is missing (blocks.0.to_q.weight_scale or blocks.0.to_q.scale_weight)"),
        ({"weight_scale": (), "scale_weight": ()}, "two scales"),
        ({"weight_scale": (8,)}, "its scale blocks.0.to_q.weight_scale is F32 [8]"),
        ({"weight_scale": (1, 16)}, "its scale blocks.0.to_q.weight_scale is F32 [1, 16]"),
        ({"weight_scale": (16, 2)}, "is F32 [16, 2]"),
        ({"weight_scale": (0,)}, "is F32 [0]"),
    ],
    ids=["none", "two", "per column", "per column, wide", "blocks", "empty"],
)
def test_dx_014_float8_weights_without_a_usable_scale_are_refused_by_name(
    tmp_path: Path, scales: dict[str, tuple[int, ...]], problem: str
) -> None:
    stored = {**values(), WEIGHT: torch.ones(16, 8).to(torch.float8_e4m3fn)}
    stored |= {f"blocks.0.to_q.{name}": torch.ones(shape) for name, shape in scales.items()}
    details = refusal(write(tmp_path, stored)).details
    assert details.keys() == {"unsupported"}
    assert details["unsupported"][0].startswith(f"{WEIGHT} is F8_E4M3, and ")
    assert problem in details["unsupported"][0]


def test_dx_014_a_scale_beside_a_plain_weight_is_unexpected(tmp_path: Path) -> None:
    details = refusal(write(tmp_path, {**values(), "blocks.0.to_q.weight_scale": torch.ones(1)})).details
    assert details == {"unexpected": ["blocks.0.to_q.weight_scale"]}


# Tied tensors.


class TextEncoder(nn.Module):
    """The embedding stands under two names: apart, or as one parameter."""

    def __init__(self, *, is_shared: bool = False) -> None:
        super().__init__()
        self.shared = nn.Embedding(6, 4)
        self.encoder = nn.Module()
        self.encoder.embed_tokens = nn.Embedding(6, 4)
        self.encoder.final = nn.Linear(4, 4)
        if is_shared:
            self.encoder.embed_tokens.weight = self.shared.weight


GROUP = ("shared.weight", "encoder.embed_tokens.weight")


def text_values(*names: str) -> dict[str, Tensor]:
    stored = values(on_meta(TextEncoder))
    return {name: tensor for name, tensor in stored.items() if name not in GROUP} | {
        name: torch.arange(24.0).reshape(6, 4).clone() for name in names
    }


@pytest.mark.parametrize("names", [GROUP[:1], GROUP[1:], GROUP], ids=str)
@pytest.mark.parametrize("is_shared", [False, True])
def test_dx_028_either_name_fills_both_with_one_tensor(tmp_path: Path, names: tuple[str, ...], is_shared: bool) -> None:
    module = on_meta(lambda: TextEncoder(is_shared=is_shared))
    files = find_weights(write(tmp_path, text_values(*names), 2))
    report = load_module(module, files, dtype=torch.float32, device="cpu", tied=() if is_shared else (GROUP,))
    assert equal(module.shared.weight, torch.arange(24.0).reshape(6, 4))
    assert module.encoder.embed_tokens.weight is module.shared.weight
    assert [set(group) for group in report.tied] == [set(GROUP)]
    assert report.num_tensors == 4
    assert report.memory_bytes == 4 * (24 + 16 + 4)


@pytest.mark.parametrize("other", [torch.zeros(6, 4), -torch.arange(24.0).reshape(6, 4), torch.ones(6, 4).bfloat16()])
def test_dx_028_two_stored_forms_must_be_equal_bit_for_bit(tmp_path: Path, other: Tensor) -> None:
    stored = {**text_values(GROUP[0]), GROUP[1]: other}
    error = refusal(write(tmp_path, stored), on_meta(TextEncoder), tied=(GROUP,))
    assert (
        "tied tensors are stored with different values: shared.weight and encoder.embed_tokens.weight" in error.message
    )


def test_dx_028_none_of_a_tied_group_is_missing_by_name(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, text_values()), on_meta(TextEncoder), tied=(GROUP,))
    assert error.details == {"missing": ["shared.weight (or, tied to it, encoder.embed_tokens.weight)"]}


def test_dx_028_an_untied_embedding_that_is_not_stored_stops_the_load(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, text_values(GROUP[0])), on_meta(TextEncoder))
    assert error.details == {"missing": ["encoder.embed_tokens.weight"]}


@pytest.mark.parametrize("names", [GROUP[:1], GROUP[1:], GROUP], ids=str)
def test_dx_028_a_module_that_has_only_one_of_the_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    module = on_meta(TextEncoder)
    del module.encoder.embed_tokens
    load(write(tmp_path, text_values(*names)), module, tied=(GROUP,))
    assert equal(module.shared.weight, torch.arange(24.0).reshape(6, 4))


def test_groups_that_overlap_are_one(tmp_path: Path) -> None:
    module = on_meta(lambda: TextEncoder(is_shared=True))
    module.lm_head = nn.Linear(4, 6, bias=False, device="meta")
    stored = {**text_values(), "lm_head.weight": torch.ones(6, 4)}
    load(write(tmp_path, stored), module, tied=(("lm_head.weight", "shared.weight"),))
    assert module.lm_head.weight is module.shared.weight is module.encoder.embed_tokens.weight
    assert equal(module.shared.weight, torch.ones(6, 4))


# Memory, buffers and the mapping.


def test_nothing_is_left_on_meta_or_it_is_our_mistake(tmp_path: Path) -> None:
    class Forgetful(Tiny):
        def init_buffers(self, device: torch.device) -> None:
            pass

    with pytest.raises(AssertionError, match=r"Forgetful: still on meta after loading: \['table'\]"):
        load(write(tmp_path, values()), on_meta(Forgetful))


def test_buffers_of_submodules_are_made_too(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tiny(1)
            self.other = nn.ModuleList([Tiny(1)])

    module = load(write(tmp_path, values(on_meta(Outer))), on_meta(Outer))
    assert module.inner.table.tolist() == module.other[0].table.tolist() == [0.0, 1.0, 2.0]


def test_a_module_that_was_not_built_on_meta_is_filled_all_the_same(tmp_path: Path) -> None:
    stored = values()
    module = load(write(tmp_path, stored), Tiny(), dtype=torch.float32)
    assert all(equal(tensor, stored[name]) for name, tensor in module.state_dict().items())


def test_changing_a_loaded_weight_leaves_the_file_alone(tmp_path: Path) -> None:
    file = write(tmp_path, values()) / f"{STEM}.safetensors"
    before = file.read_bytes()
    module = load(tmp_path)
    with torch.no_grad():
        module.mean.add_(1)
    assert module.mean.tolist() == (values()["mean"] + 1).tolist()
    assert file.read_bytes() == before


def test_a_loaded_weight_outlives_its_file(tmp_path: Path) -> None:
    file = write(tmp_path, values()) / f"{STEM}.safetensors"
    module = load(tmp_path)
    file.unlink()
    assert equal(module.mean, values()["mean"])


def test_a_file_whose_tensors_lie_between_two_elements_is_read_right(tmp_path: Path) -> None:
    stored = values()
    file = write(tmp_path, stored) / f"{STEM}.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" "
    header += b" " * (len(header) % 2 == 0)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    for name, tensor in load(tmp_path).state_dict().items():
        assert equal(tensor, stored[name])
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_a_dtype_that_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"mean": {"dtype": "F3", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / f"{STEM}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"12")
    module = on_meta(lambda: Tiny(0))
    assert "mean is F3: quantised weights aren't supported" in refusal(tmp_path, module).message


@pytest.mark.device
def test_everything_ends_on_the_device(tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    stored = values()
    module = load(write(tmp_path, stored, 3), device=device, dtype=torch.bfloat16, keep_float32=("norm2",))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert {tensor.device.type for tensor in tensors.values()} == {device.type}
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.cpu(), stored[name].to(tensor.dtype))
