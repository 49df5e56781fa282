"""What went wrong elsewhere, on described machines: defaults taken for choices, lost fast paths, crashes."""

import dataclasses

import pytest
import torch

from safelight.attention import (
    AttentionBackend,
    AttentionRequirements,
    BackendPreference,
    build_plan,
    declared_backends,
    select_backend,
)
from safelight.attention.layer import Attention
from safelight.attention.select import why_not
from safelight.config import as_settings
from safelight.errors import BackendNotSupportedError, CapabilityError
from safelight.models.wan import WanTransformer
from safelight.models.wan_config import WanConfig
from safelight.planning import layers_of, plan_model, preference_sources
from safelight.platforms import MachineFacts, PackageFacts, load_machine, machine_names

MI300X = load_machine("mi300x-rocm7-aiter")
BACKENDS = declared_backends()
SELF = AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12, equal_lengths=True)
CROSS = SELF.replace(role="cross", equal_lengths=False, replicated_keys=True)
HABIT = BackendPreference("aiter", "platform rocm", False)


def flag(backend, names=""):
    return BackendPreference(backend, "`--attention` flag", True, names)


# The six


def test_a_platform_s_habit_outside_the_supported_set_falls_back() -> None:
    selection = select_backend(SELF, MI300X, HABIT, frozenset({"flash2", "sdpa"}))
    assert (selection.backend, selection.reason) == ("flash2", "platform default fallback")
    assert selection.rejected[0].reasons[0].detail == "not supported by this attention layer"


def test_a_platform_s_habit_that_lacks_a_capability_falls_back() -> None:
    unpacked = BACKENDS | {"aiter": dataclasses.replace(BACKENDS["aiter"], packed_varlen=False)}
    selection = select_backend(SELF.replace(packed_varlen=True), MI300X, HABIT, None, unpacked)
    assert (selection.backend, selection.reason) == ("flash2", "platform default fallback")
    assert selection.rejected[0].reasons[0].detail == "no packed varlen"


@pytest.mark.parametrize("settings", [{"attention": "aiter"}, type("Namespace", (), {"attention": "aiter"})()])
def test_settings_that_cannot_say_who_set_them_are_a_habit(settings) -> None:
    sources = preference_sources(argument=None, argument_source="", settings=as_settings(settings))
    plan = plan_model("wan2.1-1.3b", MI300X, BACKENDS, sources=sources)
    rows = {(row.requirements.component, row.requirements.role): row.selection for row in plan.layers}
    assert rows["transformer", "self"].backend == "aiter"
    assert (rows["text_encoder", "self"].backend, rows["text_encoder", "self"].reason) == (
        "sdpa",
        "platform default fallback",
    )
    assert rows["transformer", "self"].preference.explicit is False


def test_a_dense_choice_that_the_layer_does_not_take_is_refused() -> None:
    with pytest.raises(BackendNotSupportedError, match="not supported by this attention layer"):
        select_backend(SELF, MI300X, flag("aiter"), frozenset({"sdpa"}))


def test_a_sparse_choice_on_cross_attention_falls_back_dense_and_says_so() -> None:
    selection = select_backend(CROSS, MI300X, flag("sliding_tile"))
    assert (selection.backend, selection.reason) == ("aiter", "dense cross-attention fallback")


def test_the_same_choice_on_self_attention_that_cannot_take_it_is_refused() -> None:
    assert select_backend(SELF, MI300X, flag("sliding_tile")).backend == "sliding_tile"
    with pytest.raises(CapabilityError, match="no mask key_padding"):
        select_backend(SELF.replace(mask="key_padding"), MI300X, flag("sliding_tile"))


def test_a_refused_sparse_backend_is_asked_once_and_never_again() -> None:
    asked = []

    def why_not(requirements, machine):
        asked.append(requirements.role)
        return ()

    sparse = AttentionBackend(
        name="picky", summary="made up", load=None, is_sparse=True, platforms=frozenset({"rocm"}), why_not=why_not
    )
    plan = build_plan(
        [group for group in layers_of("wan2.1-1.3b")("bfloat16") if not group.requirements.is_auxiliary],
        MI300X,
        [[flag("picky")]],
        BACKENDS | {"picky": sparse},
    )
    assert [row.selection.backend for row in plan.layers] == ["picky", "aiter"]
    assert asked == ["self", "cross"], "once for each kind of layer"


def test_a_built_wan_states_its_roles() -> None:
    config = WanConfig(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=32,
        num_layers=3,
    )
    with torch.device("meta"):
        model = WanTransformer(config)
    layers = {name: layer.requirements for name, layer in model.named_modules() if isinstance(layer, Attention)}
    own = [need for name, need in layers.items() if ".attn1." in name]
    cross = [need for name, need in layers.items() if ".attn2." in name]
    assert (len(own), len(cross), len(layers)) == (3, 3, 6)
    assert {(need.role, need.replicated_keys) for need in own} == {("self", False)}
    assert {(need.role, need.replicated_keys) for need in cross} == {("cross", True)}
    assert {need.component for need in layers.values()} == {"transformer"}


# A vendor's package there, absent and broken

PACKAGES = {
    "mi300x-rocm7-flash2": "flash_attn_2",
    "mi300x-rocm7-aiter": "amd_aiter",
    "h200": "flash_attn_3",
    "b200": "flash_attn_4",
    "ascend910b": "torch_npu",
    "intel-b580": "xpu_flash",
    "mtt-s5000": "mate",
}


def states(name, key):
    machine = load_machine(name)
    assert machine.packages[key].import_error is None
    broken = PackageFacts(dist="broken", version=None, import_error="OSError: libamdhip64.so.6: cannot open")
    absent = {other: facts for other, facts in machine.packages.items() if other != key}
    return {
        "there": machine,
        "absent": machine.replace(packages=absent),
        "broken": machine.replace(packages={**absent, key: broken}),
    }


@pytest.mark.parametrize("state", ["there", "absent", "broken"])
@pytest.mark.parametrize(("name", "key"), PACKAGES.items())
@pytest.mark.parametrize("model", ["wan2.1-1.3b", "wan2.2-14b"])
def test_wan_and_its_text_encoder_have_a_plan_whatever_the_package_is_like(model, name, key, state) -> None:
    machine = states(name, key)[state]
    plan = plan_model(model, machine, BACKENDS)
    chosen = {row.selection.backend for row in plan.layers if row.requirements.component.startswith("transformer")}
    of_package = {b.name for b in BACKENDS.values() if b.package is not None and b.package.key == key}
    assert bool(chosen & of_package) == (state == "there")
    assert {row.selection.reason for row in plan.layers} == {"platform default"}


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_version_that_is_not_there_is_compared_with_nothing(name, backend) -> None:
    """Every declaration gives its reasons on every machine, also where the machine tells no version of anything."""
    machine = load_machine(name)
    packages = {
        key: dataclasses.replace(facts, version=None, parameters=None, variant=None)
        for key, facts in machine.packages.items()
    }
    bare = machine.replace(
        cuda_version=None, hip_version=None, torch_version=None, driver_version=None, packages=packages
    )
    for facts in (machine, bare, bare.replace(devices=())):
        for need in (SELF, CROSS, SELF.replace(packed_varlen=True, needs_lse=True)):
            assert all(reason.detail for reason in why_not(backend, need, facts, BACKENDS))


class NoCudaHere(MachineFacts):
    """A machine of another vendor: whoever asks for its CUDA version has taken it for NVIDIA's."""

    def __getattribute__(self, name: str) -> object:
        assert name != "cuda_version", "the CUDA version was read"
        return super().__getattribute__(name)


OTHERS = [name for name in machine_names() if load_machine(name).platform != "cuda"]


@pytest.mark.parametrize("name", OTHERS)
def test_where_there_is_no_cuda_its_version_is_not_even_read(name) -> None:
    """MI300X with its packages there, absent and broken, Radeon, Ascend, Intel, Moore Threads, Apple, CPUs."""
    facts = load_machine(name)
    assert facts.cuda_version is None
    machine = NoCudaHere(**{field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)})
    plan = plan_model("wan2.1-1.3b", machine, BACKENDS)
    assert [row.selection for row in plan.layers] == [
        row.selection for row in plan_model("wan2.1-1.3b", facts, BACKENDS).layers
    ]
    assert {row.selection.reason for row in plan.layers} == {"platform default"}
    for backend in BACKENDS:
        for need in (SELF, CROSS, SELF.replace(packed_varlen=True, needs_lse=True)):
            assert why_not(backend, need, machine, BACKENDS) == why_not(backend, need, facts, BACKENDS)


def test_the_machines_without_cuda_are_of_every_other_vendor() -> None:
    assert {load_machine(name).platform for name in OTHERS} == {"rocm", "npu", "xpu", "musa", "mps", "cpu"}
    with pytest.raises(AssertionError, match="CUDA version was read"):
        assert NoCudaHere(platform="rocm").cuda_version is None
