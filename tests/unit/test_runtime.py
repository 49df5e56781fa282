"""Binding a plan to a model: who gets which kernel, what a failing kernel says, and that nothing selects afterwards."""

import itertools

import pytest
import torch
from torch import nn

from safelight.attention import AttentionBackend, AttentionRequirements, LayerGroup, Layout, build_plan, select
from safelight.attention.backends.sdpa import BACKEND as SDPA
from safelight.attention.layer import Attention
from safelight.attention.runtime import bind
from safelight.errors import BackendUnavailableError, KernelError, error_from_json
from safelight.platforms import load_machine

SELF = AttentionRequirements(head_dim=8, dtype="float32", num_heads=2, num_kv_heads=2)
CROSS = SELF.replace(role="cross", scale=0.5)


class Block(nn.Module):
    def __init__(self, self_attention, cross_attention):
        super().__init__()
        self.attn1 = Attention(self_attention)
        self.attn2 = Attention(cross_attention)


class Model(nn.Module):
    """Two blocks whose requirements are equal, but not the same objects."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(SELF.replace(), CROSS.replace()) for _ in range(2)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x_BSHD, text_BTHD, layout=None):
        for block in self.blocks:
            x_BSHD = block.attn1(x_BSHD, x_BSHD, x_BSHD, layout=layout)
            x_BSHD = block.attn2(x_BSHD, text_BTHD, text_BTHD, layout=layout)
        return x_BSHD


def made_up(load):
    return AttentionBackend(
        name="made-up", summary="made up", load=load, dtypes=frozenset({"float32"}), masks=frozenset({"none", "bias"})
    )


def plan_with(backend, *requirements):
    groups = [LayerGroup(requirements=need, count=1) for need in requirements]
    return build_plan(groups, load_machine("cpu-avx2"), (), {backend.name: backend})


def bound(load, component="transformer"):
    backend, model = made_up(load), Model()
    bind(component, model, plan_with(backend, SELF, CROSS), {backend.name: backend})
    return model


def numbered(loaded):
    """A load() that notes what it was asked for, and gives a kernel of its own each time."""

    def load(requirements):
        def kernel(q, k, v, *, scale=None, causal=False, mask=None, layout=None):
            loaded[-1][1].append((tuple(k.shape), scale, causal, mask, layout))
            return q

        loaded.append((requirements, []))
        return kernel

    return load


def test_equal_requirements_share_one_kernel() -> None:
    loaded = []
    model = bound(numbered(loaded))
    assert [requirements for requirements, _ in loaded] == [SELF, CROSS]
    first, second = model.blocks
    assert first.attn1.kernel is second.attn1.kernel
    assert first.attn2.kernel is second.attn2.kernel
    assert first.attn1.kernel is not first.attn2.kernel


def test_layers_are_named_and_know_their_backend() -> None:
    model = bound(numbered([]), component="transformer_2")
    names = [layer.name for layer in model.modules() if isinstance(layer, Attention)]
    assert names == [
        "transformer_2.blocks.0.attn1",
        "transformer_2.blocks.0.attn2",
        "transformer_2.blocks.1.attn1",
        "transformer_2.blocks.1.attn2",
    ]
    layer = model.blocks[0].attn1
    assert layer.backend.name == "made-up"
    assert layer.accepts("bias") and layer.accepts("none") and not layer.accepts("dense")


def test_a_model_that_is_one_layer_has_the_components_name() -> None:
    backend, layer = made_up(numbered([])), Attention(SELF)
    assert not layer.accepts("none")
    bind("vae", layer, plan_with(backend, SELF), {backend.name: backend})
    assert layer.name == "vae"


def test_the_kernel_gets_what_the_requirements_say() -> None:
    loaded = []
    backend, layer = made_up(numbered(loaded)), Attention(CROSS.replace(causal=True))
    bind("transformer", layer, plan_with(backend, layer.requirements), {backend.name: backend})
    q, k, mask, layout = torch.zeros(1, 3, 2, 8), torch.zeros(1, 5, 2, 8), torch.zeros(1, 1, 1, 5), Layout(step=4)
    assert layer(q, k, k, mask=mask, layout=layout) is q
    assert loaded[0][1] == [((1, 5, 2, 8), 0.5, True, mask, layout)]


def test_binding_again_changes_the_kernels() -> None:
    model = bound(numbered([]))
    bind("transformer", model, plan_with(SDPA, SELF, CROSS), {"sdpa": SDPA})
    assert {layer.backend.name for layer in model.modules() if isinstance(layer, Attention)} == {"sdpa"}
    assert model(torch.ones(1, 3, 2, 8), torch.ones(1, 5, 2, 8)).shape == (1, 3, 2, 8)


def test_a_layer_without_a_kernel_is_our_mistake() -> None:
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(AssertionError, match="transformer: no kernel is bound"):
        Attention(SELF)(q, q, q)


def test_a_layer_that_the_plan_does_not_have_is_our_mistake() -> None:
    backend = made_up(numbered([]))
    with pytest.raises(KeyError):
        bind("transformer", Model(), plan_with(backend, SELF), {backend.name: backend})


# A kernel that fails


def failing(error, after=0):
    """A load() whose kernels fail at the call with this number, counted over all layers."""
    calls = itertools.count()

    def load(requirements):
        def kernel(q, k, v, *, scale=None, causal=False, mask=None, layout=None):
            if next(calls) == after:
                raise error
            return q

        return kernel

    return load


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access\nmore lines"),
        torch.OutOfMemoryError("CUDA out of memory"),
        TypeError(),
    ],
)
def test_a_kernel_that_raises_is_an_error_with_component_layer_and_step(error) -> None:
    model = bound(failing(error, after=3))
    x = torch.zeros(1, 3, 2, 8)
    with pytest.raises(KernelError) as caught:
        model(x, x, layout=Layout(step=7))
    first = str(error).split("\n")[0] or "TypeError"
    assert caught.value.message == f"attention backend made-up failed in transformer.blocks.1.attn2, step 7: {first}"
    assert caught.value.__cause__ is error
    assert caught.value.details == {
        "component": "transformer",
        "layer": "transformer.blocks.1.attn2",
        "step": 7,
        "backend": "made-up",
    }
    assert error_from_json(caught.value.to_json()).to_json() == caught.value.to_json()


def test_a_layer_outside_the_steps_names_no_step() -> None:
    model = bound(failing(RuntimeError("no")))
    x = torch.zeros(1, 3, 2, 8)
    with pytest.raises(KernelError) as caught:
        model(x, x)
    assert caught.value.message == "attention backend made-up failed in transformer.blocks.0.attn1: no"
    assert caught.value.details["step"] is None


def test_what_is_no_failure_of_a_kernel_passes_through() -> None:
    model = bound(failing(KeyboardInterrupt()))
    x = torch.zeros(1, 3, 2, 8)
    with pytest.raises(KeyboardInterrupt):
        model(x, x)


def test_a_kernel_that_cannot_be_loaded_is_named_with_its_cause() -> None:
    def load(requirements):
        raise ImportError("undefined symbol: _ZN3c104cuda\nin made_up.so")

    with pytest.raises(BackendUnavailableError) as caught:
        bound(load)
    assert (
        "attention backend made-up, selected for transformer.self, can't be loaded: ImportError: undefined symbol: "
        in (caught.value.message)
    )
    assert isinstance(caught.value.__cause__, ImportError)
    assert caught.value.details["cause"] == "ImportError: undefined symbol: _ZN3c104cuda"


# Forward selects nothing


def test_a_forward_pass_makes_no_selection(monkeypatch) -> None:
    calls = []

    def counted(name):
        real = getattr(select, name)

        def call(*args, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        return call

    for name in ("why_not", "preferred", "canonical", "declared_backends"):
        monkeypatch.setattr(select, name, counted(name))
    loaded = []
    model = bound(numbered(loaded))
    assert calls.count("why_not") == 2, "selection is counted, once for each kind of layer"
    calls.clear()
    loads = len(loaded)
    for step in range(3):
        model(torch.zeros(1, 3, 2, 8), torch.zeros(1, 5, 2, 8), layout=Layout(step=step))
    assert calls == [] and len(loaded) == loads
