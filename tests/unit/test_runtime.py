"""Binding a plan to a model: who gets which kernel, what a failing kernel says, and that nothing selects afterwards."""

import dataclasses
import itertools
import subprocess

import pytest
import torch
from torch import nn

from safelight.attention import (
    AttentionBackend,
    AttentionPlan,
    AttentionRequirements,
    BackendPreference,
    LayerGroup,
    Layout,
    PlannedLayer,
    build_plan,
    select,
    select_backend,
)
from safelight.attention.backends.sdpa import BACKEND as SDPA
from safelight.attention.layer import Attention
from safelight.attention.runtime import bind, load_plan
from safelight.errors import BackendUnavailableError, KernelError, error_from_json
from safelight.platforms import PackageFacts, load_machine
from safelight.platforms.packages import Package

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


def loaded_with(backend, *requirements, count=2, component="transformer"):
    groups = [LayerGroup(requirements=need.replace(component=component), count=count) for need in requirements]
    backends = {backend.name: backend}
    return load_plan(lambda machine: build_plan(groups, machine, (), backends), load_machine("cpu-avx2"), backends)


def bound(load, component="transformer"):
    model = Model()
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.requirements = layer.requirements.replace(component=component)
    bind(component, model, loaded_with(made_up(load), SELF, CROSS, component=component))
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
    layer = Attention(SELF.replace(component="vae"))
    assert not layer.accepts("none")
    bind("vae", layer, loaded_with(made_up(numbered([])), SELF, count=1, component="vae"))
    assert layer.name == "vae"


def test_the_kernel_gets_what_the_requirements_say() -> None:
    loaded = []
    layer = Attention(CROSS.replace(causal=True))
    bind("transformer", layer, loaded_with(made_up(numbered(loaded)), layer.requirements, count=1))
    q, k, mask, layout = torch.zeros(1, 3, 2, 8), torch.zeros(1, 5, 2, 8), torch.zeros(1, 1, 1, 5), Layout(step=4)
    assert layer(q, k, k, mask=mask, layout=layout) is q
    assert loaded[0][1] == [((1, 5, 2, 8), 0.5, True, mask, layout)]


def test_binding_again_changes_the_kernels() -> None:
    model = bound(numbered([]))
    bind("transformer", model, loaded_with(SDPA, SELF, CROSS))
    assert {layer.backend.name for layer in model.modules() if isinstance(layer, Attention)} == {"sdpa"}
    assert model(torch.ones(1, 3, 2, 8), torch.ones(1, 5, 2, 8)).shape == (1, 3, 2, 8)


def test_a_layer_without_a_kernel_is_our_mistake() -> None:
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(AssertionError, match="transformer: no kernel is bound"):
        Attention(SELF)(q, q, q)


def test_a_layer_that_the_plan_does_not_have_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match=r"transformer\.blocks\.0\.attn2: the plan has no such layer"):
        bind("transformer", Model(), loaded_with(made_up(numbered([])), SELF))


@pytest.mark.parametrize("count", [1, 3])
def test_a_plan_with_another_number_of_layers_is_our_mistake(count) -> None:
    with pytest.raises(AssertionError, match="transformer has"):
        bind("transformer", Model(), loaded_with(made_up(numbered([])), SELF, CROSS, count=count))


def test_layers_that_differ_in_their_scope_alone_get_their_own_kernels() -> None:
    one = made_up(numbered([]))
    other = AttentionBackend(name="other", summary="made up", load=numbered([]), dtypes=one.dtypes)
    backends = {"made-up": one, "other": other}
    groups = [
        LayerGroup(requirements=SELF, count=1),
        LayerGroup(requirements=SELF, count=1, supported=frozenset({"other"})),
    ]
    machine = load_machine("cpu-avx2")
    loaded = load_plan(lambda machine: build_plan(groups, machine, (), backends), machine, backends)
    model = nn.ModuleList([Attention(SELF), Attention(SELF, frozenset({"other"}))])
    bind("transformer", model, loaded)
    assert [layer.backend.name for layer in model] == ["made-up", "other"]


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
    assert caught.value.message == f"attention backend made-up failed in transformer.blocks.1.attn2, step 8: {first}"
    assert caught.value.__cause__ is error
    assert caught.value.details == {
        "component": "transformer",
        "layer": "transformer.blocks.1.attn2",
        "step": 8,
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


# A kernel that can't be loaded (S11)


def with_package(name, load, **fields):
    package = Package(key=f"{name}_package", dists=(f"{name}-kernels",), remedy="install it")
    return AttentionBackend(
        name=name, summary=name, load=load, package=package, dtypes=frozenset({"float32"}), **fields
    )


def raising(error, loads):
    def load(requirements):
        loads.append(requirements.role)
        raise error

    return load


def plan_and_load(backends, *preferences):
    packages = {backend.package.key: PackageFacts(dist=backend.package.dists[0]) for backend in backends}
    machine = load_machine("cpu-avx2").replace(packages=packages)
    by_name = {backend.name: backend for backend in backends} | {"sdpa": SDPA}
    groups = [LayerGroup(requirements=need, count=1) for need in (SELF, CROSS)]

    def plan_for(machine):
        return build_plan(groups, machine, [preferences], by_name)

    return load_plan(plan_for, machine, by_name)


IMPLICIT = BackendPreference("first", "a platform's habit", False)


def test_an_unasked_kernel_that_cannot_be_loaded_is_recorded_and_planned_around() -> None:
    loads = []
    loaded = plan_and_load([with_package("first", raising(OSError("libfirst.so: no\nmore"), loads))], IMPLICIT)
    assert [layer.selection.backend for layer in loaded.plan.layers] == ["sdpa", "sdpa"]
    assert loaded.plan.machine.packages["first_package"].import_error == "OSError: libfirst.so: no"
    (refused,) = loaded.plan.layers[0].selection.rejected
    assert refused.reasons[0].detail == "package first-kernels is broken: OSError: libfirst.so: no"
    assert loads == ["self"], "a broken package is asked once"


def test_a_kernel_of_torch_s_own_is_planned_around_too() -> None:
    first = dataclasses.replace(with_package("first", raising(OSError("no"), [])), package=None)
    by_name = {"first": first, "sdpa": SDPA}
    groups = [LayerGroup(requirements=SELF, count=1)]

    def plan_for(machine):
        return build_plan(groups, machine, [[IMPLICIT]], by_name)

    loaded = load_plan(plan_for, load_machine("cpu-avx2"), by_name)
    (layer,) = loaded.plan.layers
    assert (layer.selection.backend, layer.selection.reason) == ("sdpa", "platform default fallback")
    assert layer.selection.rejected[0].reasons[0].detail == "first can't be loaded: OSError: no"


def test_a_wish_for_an_auxiliary_component_is_planned_around_whenever_it_turns_out_broken() -> None:
    first = with_package("first", raising(OSError("no"), []))
    by_name = {"first": first, "sdpa": SDPA}
    text = SELF.replace(component="text_encoder", is_auxiliary=True)
    groups = [LayerGroup(requirements=text, count=1)]
    machine = load_machine("cpu-avx2").replace(packages={"first_package": PackageFacts(dist="first-kernels")})

    def planned(names):
        wish = BackendPreference("first", "`--attention` flag", True, names)
        return load_plan(lambda machine: build_plan(groups, machine, [[wish]], by_name), machine, by_name)

    (layer,) = planned("").plan.layers
    assert (layer.selection.backend, layer.selection.reason) == ("sdpa", "not required for text_encoder")
    with pytest.raises(BackendUnavailableError, match="can't be loaded: OSError: no"):
        planned("text_encoder")


class VendorError(Exception):
    """An error of a vendor's own class."""


@pytest.mark.parametrize(
    "error", [VendorError("no device"), subprocess.CalledProcessError(1, "rocminfo"), SystemExit(3)]
)
def test_a_package_may_fail_with_any_error(error) -> None:
    loaded = plan_and_load([with_package("first", raising(error, []))], IMPLICIT)
    assert [layer.selection.backend for layer in loaded.plan.layers] == ["sdpa", "sdpa"]


def test_a_chosen_kernel_that_cannot_be_loaded_is_an_error_with_the_first_cause() -> None:
    first = with_package("first", raising(OSError("libfirst.so: no\nmore lines"), []))
    with pytest.raises(BackendUnavailableError) as caught:
        plan_and_load([first], BackendPreference("first", "`--attention` flag", True))
    assert caught.value.details["cause"] == "OSError: libfirst.so: no"
    assert caught.value.details["package"] == "first_package"
    assert "attention backend first, selected for transformer.self, can't be loaded" in caught.value.message
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.details["preference"]["source"] == "`--attention` flag"


def test_a_sparse_choice_s_dense_fallback_may_fall_further() -> None:
    """The fallback of an explicit choice was asked for by nobody."""
    sparse = with_package("sparse", lambda requirements: "kernel", is_sparse=True)
    dense = with_package("dense", raising(ImportError("no"), []))
    by_name = {"sparse": sparse, "dense": dense, "sdpa": SDPA}
    packages = {backend.package.key: PackageFacts(dist="p") for backend in (sparse, dense)}
    wish = BackendPreference("sparse", "`--attention` flag", True)

    def plan_for(machine):
        selection = select_backend(CROSS, machine, wish, None, by_name, order=("dense", "sdpa"))
        layer = PlannedLayer(requirements=CROSS, count=1, selection=selection)
        return AttentionPlan(machine=machine, layers=(layer,))

    loaded = load_plan(plan_for, load_machine("cpu-avx2").replace(packages=packages), by_name)
    assert [layer.selection.backend for layer in loaded.plan.layers] == ["sdpa"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), KeyboardInterrupt()])
def test_running_out_of_memory_is_no_broken_package(error) -> None:
    with pytest.raises(type(error)) as caught:
        plan_and_load([with_package("first", raising(error, []))], IMPLICIT)
    assert caught.value is error


def test_when_every_package_is_broken_nothing_is_left() -> None:
    first = with_package("first", raising(ImportError("no"), []))
    groups = [LayerGroup(requirements=SELF, count=1)]
    machine = load_machine("cpu-avx2").replace(packages={"first_package": PackageFacts(dist="first-kernels")})
    with pytest.raises(BackendUnavailableError, match="package first-kernels is broken: ImportError: no"):
        load_plan(lambda machine: build_plan(groups, machine, (), {"first": first}), machine, {"first": first})


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
