"""select_backend and preferred: rules S1 to S10 on made-up backends and described machines."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from safelight.attention import (
    AttentionBackend,
    AttentionRequirements,
    BackendPreference,
    Reason,
    Selection,
    declared_backends,
    select_backend,
)
from safelight.attention.select import canonical, preferred, why_not
from safelight.errors import (
    BackendNotSupportedError,
    BackendUnavailableError,
    CapabilityError,
    NoBackendError,
    RequestError,
    SelectionError,
)
from safelight.platforms import load_machine, machine_names
from safelight.platforms.facts import PackageFacts
from safelight.platforms.packages import Package

ALL_MASKS = frozenset({"none", "key_padding", "dense", "bias"})
ALL_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


def backend(name, **fields):
    return AttentionBackend(name=name, summary=f"a made-up {name}", load=None, **fields)


BACKENDS = {
    made.name: made
    for made in (
        backend("sdpa", dtypes=ALL_DTYPES, masks=ALL_MASKS, aliases=("native", "torch_sdpa")),
        backend(
            "flash2",
            platforms=frozenset({"cuda", "rocm"}),
            package=Package(key="flash_attn_2", dists=("flash-attn",), remedy="install it"),
            head_dims=lambda head_dim: head_dim % 8 == 0 and head_dim <= 256,
            head_dims_text="multiples of 8 up to 256",
            aliases=("fa", "fa2"),
        ),
        backend(
            "flash3",
            platforms=frozenset({"cuda"}),
            arches={"cuda": ("sm90",)},
            package=Package(key="flash_attn_3", dists=("flash_attn_3",), remedy="install it"),
            head_dims=lambda head_dim: head_dim <= 256,
            head_dims_text="up to 256",
        ),
        backend("sliding", platforms=frozenset({"cuda"}), is_sparse=True),
        backend("laser", platforms=frozenset({"cuda"}), self_only=True, cross_lengths=False),
        backend("sage", is_lossy=True),
        backend("fussy", dtypes=ALL_DTYPES, platforms=frozenset({"mps"})),
    )
}

SELF = AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12)
CROSS = SELF.replace(role="cross")
TEXT = SELF.replace(component="text_encoder", is_auxiliary=True)

H100 = load_machine("h100").replace(
    packages={
        "flash_attn_2": PackageFacts(dist="flash-attn", version="2.8.3"),
        "flash_attn_3": PackageFacts(dist="flash_attn_3", version="3.0.0"),
    }
)
A100 = load_machine("a100").replace(packages=H100.packages)
MI300X = load_machine("mi300x-rocm7")
MAC = load_machine("m4-max")
CPU = load_machine("cpu-avx2")


def flag(name, names=""):
    return BackendPreference(name, "`--attention` flag", True, names)


def habit(name, names=""):
    return BackendPreference(name, "platform default", False, names)


def choose(requirements, machine, preference=None, supported=None, backends=BACKENDS):
    return select_backend(requirements, machine, preference, supported, backends)


def refused(error, *args, **kwargs):
    with pytest.raises(error) as caught:
        choose(*args, **kwargs)
    assert type(caught.value) is error
    return caught.value


def kinds(selection_or_error):
    """The kinds of reasons by refused backend."""
    rejected = (
        selection_or_error.to_json()["rejected"]
        if isinstance(selection_or_error, Selection)
        else selection_or_error.details["rejected"]
    )
    return {verdict["backend"]: {reason["kind"] for reason in verdict["reasons"]} for verdict in rejected}


# S1: where a preference comes from


def test_the_nearest_source_wins_whatever_it_names() -> None:
    request, argument, environment = [flag("a")], [flag("b", "transformer.self")], [flag("c", "transformer")]
    assert preferred(SELF, (request, argument, environment)) == flag("a")
    assert preferred(SELF, ([], argument, environment)) == flag("b", "transformer.self")
    assert preferred(CROSS, ([], argument, environment)) == flag("c", "transformer")
    assert preferred(TEXT, ([], argument, environment)) is None


def test_within_a_source_the_most_specific_name_wins() -> None:
    source = [flag("everything"), flag("component", "transformer"), flag("role", "transformer.self")]
    for order in (source, source[::-1]):
        assert preferred(SELF, [order]) == flag("role", "transformer.self")
        assert preferred(CROSS, [order]) == flag("component", "transformer")
        assert preferred(TEXT, [order]) == flag("everything")


def test_auto_ends_the_search() -> None:
    farther = [flag("flash2"), flag("flash2", "transformer.self")]
    assert preferred(SELF, ([flag("auto")], farther)) is None
    assert preferred(SELF, ([flag("flash2"), flag("auto", "transformer")], farther)) is None
    assert preferred(TEXT, ([flag("flash2"), flag("auto", "transformer")], farther)) == flag("flash2")


def test_auto_prefers_nothing() -> None:
    selection = choose(SELF, H100, flag("auto"))
    assert selection == choose(SELF, H100)
    assert (selection.backend, selection.preference, selection.reason) == ("flash3", None, "platform default")


# S2, S5: explicit is honoured or refused, implicit falls back


def test_an_explicit_choice_is_honoured() -> None:
    selection = choose(SELF, H100, flag("flash2"))
    assert (selection.backend, selection.reason, selection.rejected) == ("flash2", None, ())
    assert selection.preference == flag("flash2")
    assert [verdict.backend for verdict in selection.verdicts] == ["flash2"]


def test_an_explicit_choice_that_does_not_fit_is_refused() -> None:
    error = refused(BackendUnavailableError, SELF, MI300X, flag("flash3"))
    assert kinds(error) == {"flash3": {"platform", "package"}}


def test_an_implicit_preference_is_taken_where_it_fits() -> None:
    selection = choose(SELF, H100, habit("flash2"))
    assert (selection.backend, selection.reason) == ("flash2", None)


@pytest.mark.parametrize(
    ("requirements", "supported", "kind"),
    [
        (SELF, frozenset({"sdpa"}), "scope"),
        (SELF.replace(packed_varlen=True), None, "capability"),
        (SELF.replace(head_dim=512), None, "capability"),
    ],
)
def test_an_implicit_preference_falls_back(requirements, supported, kind) -> None:
    backends = BACKENDS | {"sdpa": replace(BACKENDS["sdpa"], packed_varlen=True)}
    selection = choose(requirements, H100, habit("flash2"), supported, backends)
    assert (selection.backend, selection.reason) == ("sdpa", "platform default fallback")
    assert kind in kinds(selection)["flash2"]
    assert selection.preference == habit("flash2")


def test_an_implicit_preference_nobody_knows_falls_back() -> None:
    selection = choose(SELF, CPU, habit("flashier"))
    assert (selection.backend, selection.reason) == ("sdpa", "platform default fallback")
    assert kinds(selection)["flashier"] == {"unknown"}


@pytest.mark.parametrize(
    ("preference", "kind"),
    [
        (flag("sliding"), {"capability"}),
        (flag("sliding", "transformer"), {"capability"}),
        (flag("laser"), {"capability"}),
        (flag("laser", "transformer"), {"capability"}),
        (habit("sliding"), {"capability", "policy"}),
        (habit("laser"), {"capability"}),
    ],
)
def test_a_kernel_for_self_attention_falls_back_on_cross(preference, kind) -> None:
    selection = choose(CROSS, H100, preference)
    assert (selection.backend, selection.reason) == ("flash3", "dense cross-attention fallback")
    assert kinds(selection) == {preference.backend: kind}


@pytest.mark.parametrize("name", ["sliding", "laser"])
def test_naming_the_role_makes_it_strict(name) -> None:
    error = refused(CapabilityError, CROSS, H100, flag(name, "transformer.cross"))
    assert kinds(error) == {name: {"capability"}}
    assert choose(SELF, H100, flag(name)).backend == name


@pytest.mark.parametrize("name", ["sliding", "laser"])
def test_the_same_choice_on_self_attention_that_cannot_take_it_is_refused(name) -> None:
    error = refused(CapabilityError, SELF.replace(mask="dense"), H100, flag(name))
    assert kinds(error) == {name: {"capability"}}


def test_cross_attention_is_no_way_out_for_a_dense_kernel() -> None:
    error = refused(BackendUnavailableError, CROSS, CPU, flag("flash2"))
    assert kinds(error) == {"flash2": {"platform", "package"}}


def test_an_explicit_dense_mismatch_says_that_the_layer_does_not_take_it() -> None:
    error = refused(BackendNotSupportedError, SELF, H100, flag("flash2"), frozenset({"sdpa"}))
    assert "flash2: not supported by this attention layer" in error.message


def test_a_refused_candidate_is_asked_once_and_never_again() -> None:
    asked = []

    def watch(requirements, machine):
        asked.append(requirements.role)
        return ()

    backends = BACKENDS | {"sliding": replace(BACKENDS["sliding"], why_not=watch)}
    assert choose(CROSS, H100, flag("sliding"), None, backends).backend == "flash3"
    assert asked == ["cross"]


# S3: auxiliary components


def test_a_global_choice_is_a_wish_for_an_auxiliary_component() -> None:
    needs_bias = TEXT.replace(mask="bias", dtype="float32")
    selection = choose(needs_bias, H100, flag("flash3"))
    assert (selection.backend, selection.reason) == ("sdpa", "not required for text_encoder")
    assert selection.preference == flag("flash3")
    assert kinds(selection)["flash3"] == {"capability"}
    assert choose(TEXT, H100, flag("flash3")).reason is None


def test_a_wish_may_be_lossy_since_a_person_said_it() -> None:
    selection = choose(TEXT, H100, flag("sage"))
    assert (selection.backend, selection.reason) == ("sage", None)


@pytest.mark.parametrize("names", ["text_encoder", "text_encoder.self"])
def test_naming_an_auxiliary_component_makes_it_strict(names) -> None:
    error = refused(CapabilityError, TEXT.replace(mask="bias"), H100, flag("flash3", names))
    assert error.details["preference"]["names"] == names
    refused(BackendUnavailableError, TEXT, CPU, flag("flash3", names))


# S4, S7, S8: candidates, their order, and what is never taken unasked


def test_candidates_are_the_preferred_the_order_of_the_machine_and_the_rest_by_name() -> None:
    needs_all = SELF.replace(mask="bias", num_heads=11, num_kv_heads=11)
    selection = choose(needs_all, H100, habit("laser"), None, BACKENDS)
    assert [verdict.backend for verdict in selection.verdicts] == ["laser", "flash3", "flash2", "sdpa"]
    without_sdpa = {name: made for name, made in BACKENDS.items() if name != "sdpa"}
    error = refused(CapabilityError, needs_all, H100, habit("laser"), None, without_sdpa)
    assert list(kinds(error)) == ["laser", "flash3", "flash2", "fussy", "sage", "sliding"]


def test_the_rest_are_the_layers_supported_set() -> None:
    error = refused(CapabilityError, SELF.replace(mask="bias"), H100, None, frozenset({"sage", "flash2"}), BACKENDS)
    assert list(kinds(error)) == ["flash3", "flash2", "sdpa", "sage"]
    assert kinds(error)["sdpa"] == {"scope"}
    assert kinds(error)["flash3"] == {"scope", "capability"}


def test_each_candidate_is_tried_once() -> None:
    selection = choose(SELF.replace(mask="bias"), H100, habit("fa"))
    assert [verdict.backend for verdict in selection.verdicts] == ["flash2", "flash3", "sdpa"]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (H100, "flash3"),
        (A100, "flash2"),
        (load_machine("h100").replace(packages={}), "sdpa"),
        (MI300X, "sdpa"),
        (MAC, "sdpa"),
        (CPU, "sdpa"),
    ],
)
def test_the_order_is_that_of_this_very_machine(machine, expected) -> None:
    assert choose(SELF, machine).backend == expected


def test_a_broken_package_is_passed_over_with_its_cause() -> None:
    broken = PackageFacts(dist="flash-attn", version="2.8.3", import_error="ImportError: libcudart.so.12: not found")
    machine = MI300X.replace(packages={"flash_attn_2": broken})
    selection = choose(SELF, machine)
    assert selection.backend == "sdpa"
    (reason,) = why_not("flash2", SELF, machine, BACKENDS)
    assert reason == Reason("package", "package flash-attn is broken: ImportError: libcudart.so.12: not found")


@pytest.mark.parametrize("name", ["sliding", "sage"])
def test_a_kernel_that_changes_the_picture_is_never_taken_unasked(name) -> None:
    only = {name: BACKENDS[name]}
    for preference in (None, habit(name), flag("auto")):
        error = refused(NoBackendError, SELF, H100, preference, None, only)
        assert kinds(error) == {name: {"policy"}}
        assert error.details["would_do"] == [name]
    assert choose(SELF, H100, flag(name), None, only).backend == name


def test_the_order_of_registration_does_not_matter() -> None:
    two = backend("another", aliases=("native",))
    for backends in (BACKENDS | {"another": two}, {"another": two} | dict(reversed(BACKENDS.items()))):
        assert choose(SELF, H100, None, None, backends) == choose(SELF, H100)
        assert canonical("native", backends) == "another"


def test_an_alias_is_the_backend_and_what_was_asked_stays_on_record() -> None:
    selection = choose(SELF, H100, flag("fa2"))
    assert (selection.backend, selection.reason) == ("flash2", None)
    assert selection.preference == flag("fa2")
    assert choose(SELF, H100, flag("native"), frozenset({"sdpa"})).backend == "sdpa"


# S6, S10: verdicts and the supported set


def test_a_machine_without_a_device_is_no_crash() -> None:
    bare = H100.replace(devices=())
    assert choose(SELF, bare).backend == "sdpa"
    assert why_not("flash3", SELF, bare, BACKENDS)[0].kind == "arch"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sdpaa", " (did you mean sdpa?)"),
        ("SDPAA", " (did you mean sdpa?)"),
        ("fa22", " (did you mean fa2?)"),
        ("?", ""),
    ],
)
def test_an_unknown_name_has_a_suggestion_and_the_names_there_are(name, hint) -> None:
    error = refused(BackendNotSupportedError, SELF, CPU, flag(name))
    assert kinds(error) == {name: {"unknown"}}
    assert f"no backend has this name{hint}, there are {', '.join(sorted(BACKENDS))}" in error.message


@pytest.mark.parametrize("name", ["sdpa", "SDPA", "native", "Torch_SDPA"])
def test_aliases_and_capitals_name_the_same_backend(name) -> None:
    selection = choose(SELF, CPU, flag(name))
    assert (selection.backend, selection.reason) == ("sdpa", None)


def test_the_supported_set_narrows_the_automatic_choice() -> None:
    selection = choose(SELF, H100, None, frozenset({"flash2", "sdpa"}))
    assert (selection.backend, kinds(selection)) == ("flash2", {"flash3": {"scope"}})


# S9: the kind of error and its message


@pytest.mark.parametrize(
    ("requirements", "machine", "preference", "supported", "error"),
    [
        (SELF.replace(mask="bias"), CPU, flag("flash3"), frozenset({"sdpa"}), CapabilityError),
        (SELF, CPU, flag("flash3"), frozenset({"sdpa"}), BackendNotSupportedError),
        (SELF, CPU, flag("nonsense"), None, BackendNotSupportedError),
        (SELF, CPU, flag("flash3"), None, BackendUnavailableError),
        (SELF, A100, flag("flash3"), None, BackendUnavailableError),
        (SELF, load_machine("a100"), flag("flash2"), None, BackendUnavailableError),
        (SELF, H100, None, frozenset(), BackendNotSupportedError),
        (SELF.replace(needs_lse=True), H100, None, None, CapabilityError),
    ],
)
def test_the_kind_of_error_follows_what_has_to_be_done(requirements, machine, preference, supported, error) -> None:
    caught = refused(error, requirements, machine, preference, supported)
    assert isinstance(caught, RequestError) and caught.exit_status == 2


def test_no_backend_where_there_is_no_candidate_at_all() -> None:
    error = refused(NoBackendError, SELF, CPU, None, None, {})
    assert error.message == (
        "no attention backend for transformer.self (head_dim 128, bfloat16) on cpu cpu-avx2: nothing was asked for. "
        "Refused: none, there are no candidates. No declared backend would do."
    )


def test_the_message_of_a_refusal() -> None:
    need = CROSS.replace(mask="key_padding", head_dim=100)
    error = refused(CapabilityError, need, MI300X, flag("flash2", "transformer"))
    assert error.message == (
        "no attention backend for transformer.cross (head_dim 100, bfloat16) on rocm gfx942: flash2 was asked for "
        "(`--attention` flag). Refused: flash2: package flash-attn is not installed (install it) and "
        "no head_dim 100 (takes multiples of 8 up to 256) and no mask key_padding (takes no mask at all). "
        "These would do: sdpa; pick one with --attention transformer.cross=sdpa."
    )
    assert error.details["layer"] == "transformer.cross"
    assert error.details["requirements"] == need.to_json()
    assert error.details["would_do"] == ["sdpa"]


def test_the_message_names_every_candidate_and_what_preferred_it() -> None:
    error = refused(CapabilityError, SELF.replace(needs_lse=True), MAC, habit("flash2"))
    assert "flash2 was preferred (platform default)" in error.message
    assert list(kinds(error)) == ["flash2", "sdpa", "flash3", "fussy", "laser", "sage", "sliding"]
    for name in kinds(error):
        assert f"{name}: " in error.message
    assert error.message.endswith("No declared backend would do.")


def test_the_first_that_would_do_is_what_an_automatic_choice_takes() -> None:
    error = refused(BackendNotSupportedError, SELF, H100, flag("nonsense"))
    assert error.details["would_do"] == ["flash3", "flash2", "sdpa", "laser", "sage", "sliding"]
    assert "pick one with --attention transformer.self=flash3." in error.message


# JSON, and that selection is pure


@pytest.mark.parametrize(
    "preference",
    [
        flag("sage"),
        habit("flash2", "transformer.self"),
        BackendPreference("sliding", "the request", True, "transformer", (("tile", 8), ("mode", "3d"))),
    ],
)
def test_a_preference_round_trips_through_json(preference) -> None:
    assert BackendPreference.from_json(json.loads(json.dumps(preference.to_json()))) == preference


def test_the_public_form_of_a_preference() -> None:
    assert flag("sage").to_json() == {"backend": "sage", "source": "`--attention` flag", "explicit": True}
    assert flag("sage", "vae").to_json()["names"] == "vae"


@pytest.mark.parametrize("preference", [None, flag("sliding"), habit("nonsense")])
def test_a_selection_round_trips_through_json(preference) -> None:
    selection = choose(CROSS.replace(mask="dense"), H100, preference)
    assert Selection.from_json(json.loads(json.dumps(selection.to_json()))) == selection


@pytest.mark.parametrize("name", machine_names())
def test_the_declared_backends_serve_every_described_machine(name) -> None:
    """With nothing passed in, everything declared and the platform's own order are used."""
    selection = select_backend(SELF.replace(dtype="float32"), load_machine(name))
    assert selection.backend in declared_backends()
    with pytest.raises(SelectionError):
        select_backend(SELF, load_machine(name), flag("no-such-backend"))


def test_selecting_imports_no_torch() -> None:
    code = (
        "import sys; from safelight.attention import *; from safelight.platforms import load_machine\n"
        "need = AttentionRequirements(head_dim=64, dtype='float32', num_heads=2, num_kv_heads=2)\n"
        "print(select_backend(need, load_machine('h100')).backend, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sdpa", "False"]
