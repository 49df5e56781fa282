"""Devices without float64, complex128 and float8 (Metal, some NPUs): nothing of these is made there."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from safelight.attention import build_plan, declared_backends
from safelight.attention.runtime import bind, load_plan
from safelight.models.umt5 import Umt5Encoder
from safelight.models.wan import WanTransformer
from safelight.models.wan_vae import WanVaeDecoder
from safelight.pipelines.wan.pipeline import WanPipeline
from safelight.planning import check_model
from safelight.platforms import load_machine
from safelight.request import Request
from safelight.text import Tokenizer
from tests.wan_reference import write_checkpoint

FORBIDDEN = {torch.float64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2}


class Poor(TorchDispatchMode):
    """Stands for a device without these dtypes: the meta device, on which every operation has a result's form."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.device.type == "meta" and value.dtype in FORBIDDEN:
                raise TypeError(f"{func} makes {value.dtype} on the device")
        return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def pipeline_on_meta(folder: Path, dtype: str) -> WanPipeline:
    checkpoint = check_model(folder)
    with torch.device("meta"):
        text_encoder = Umt5Encoder(checkpoint.text_encoder, dtype)
        transformer = WanTransformer(checkpoint.transformer, getattr(torch, dtype))
        vae = WanVaeDecoder(checkpoint.vae, torch.float32)
    tokenizer = Tokenizer.from_folder(folder / "tokenizer")
    pipeline = WanPipeline(checkpoint, tokenizer, text_encoder, {"transformer": transformer}, vae, torch.device("meta"))
    groups, backends = checkpoint.layer_groups(dtype), declared_backends()
    loaded = load_plan(lambda machine: build_plan(groups, machine, [], backends), load_machine("m4-max"), backends)
    for component, module in pipeline.modules.items():
        bind(component, module.eval().requires_grad_(False), loaded)
    return pipeline


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dx_083_a_whole_run_makes_none_on_the_device(tiny: Path, dtype: str) -> None:
    pipeline = pipeline_on_meta(tiny, dtype)
    request = pipeline.checkpoint.resolve(Request(prompt="a red circle", negative_prompt="a dog", num_steps=2, seed=1))
    with torch.inference_mode(), Poor():
        text, _ = pipeline.encode(request)
        states = list(pipeline.denoise(request, text, [1, 2]))
        frames = pipeline.decode(states[-1].latents[:1], lambda step, num_steps: None)
    assert [state.step for state in states] == [0, 1, 2]
    assert (states[-1].latents.device.type, frames.device.type) == ("meta", "meta")
    assert frames.shape[-1] == 3


def test_the_watch_sees_what_it_forbids() -> None:
    with Poor(), pytest.raises(TypeError, match=r"makes torch\.float64 on the device"):
        torch.zeros(2, dtype=torch.float32, device="meta").double()
