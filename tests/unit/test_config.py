"""Settings from an environment and a config file, and choices of attention backends from text."""

import dataclasses
from argparse import Namespace
from types import SimpleNamespace

import pytest

from safelight.attention.requirements import ROLES as LAYER_ROLES
from safelight.config import (
    ROLES,
    UNATTRIBUTED,
    AttentionChoice,
    Setting,
    Settings,
    as_settings,
    attention_choices,
    environment_switches,
    parse_attention,
)
from safelight.errors import RequestError
from safelight.platforms import platforms, probe_machine
from tests.rules.source import ROOT
from tests.unit.fake_torch import fake_torch

FLAG = "`--attention` flag"
DOCUMENT = ROOT / "docs/configuration.md"


def choice(names, backend, source=FLAG):
    return AttentionChoice(names=names, backend=backend, source=source)


def test_roles_are_those_of_the_layers():
    assert ROLES == LAYER_ROLES


def test_nothing_set():
    assert Settings.read({}) == Settings(model=None, attention=(), device=None, dtype=None)
    assert Settings.read({"PATH": "/bin", "SAFELIGHT": "x"}) == Settings()


def test_each_value_remembers_its_variable():
    settings = Settings.read(
        {
            "SAFELIGHT_MODEL": "models/my wan",
            "SAFELIGHT_ATTENTION": "transformer.self=flash3,text_encoder=sdpa",
            "SAFELIGHT_DEVICE": "cuda:1",
            "SAFELIGHT_DTYPE": "bfloat16",
        }
    )
    assert settings == Settings(
        model=Setting("models/my wan", "`SAFELIGHT_MODEL`"),
        attention=(
            (
                choice("transformer.self", "flash3", "`SAFELIGHT_ATTENTION`"),
                choice("text_encoder", "sdpa", "`SAFELIGHT_ATTENTION`"),
            ),
        ),
        device=Setting("cuda:1", "`SAFELIGHT_DEVICE`"),
        dtype=Setting("bfloat16", "`SAFELIGHT_DTYPE`"),
    )


def test_settings_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().model = Setting("x", "y")
    with pytest.raises(TypeError):
        Settings(Setting("x", "y"))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SAFELIGHT_MODEL": ""}, "`SAFELIGHT_MODEL` is ''; give a model's path or hub id, or leave it unset"),
        ({"SAFELIGHT_MODEL": " "}, "`SAFELIGHT_MODEL` is ' '; give a model's path or hub id, or leave it unset"),
        ({"SAFELIGHT_DTYPE": "fp16"}, "`SAFELIGHT_DTYPE` is 'fp16'; it must be float32, bfloat16 or float16"),
        ({"SAFELIGHT_DTYPE": ""}, "`SAFELIGHT_DTYPE` is ''; it must be float32, bfloat16 or float16"),
        (
            {"SAFELIGHT_ATTENTION": ""},
            "`SAFELIGHT_ATTENTION`: '' names no backend; write NAME or WHERE=NAME, as in transformer.self=sdpa",
        ),
        (
            {"SAFELIGHT_ATTENTION": "transformer.sel=sdpa"},
            (
                "`SAFELIGHT_ATTENTION`: 'transformer.sel=sdpa': 'sel' is no role; the roles are self, cross, joint"
                " (did you mean self?)"
            ),
        ),
        (
            {"SAFELIGHT_DTYPE": "bf16"},
            "`SAFELIGHT_DTYPE` is 'bf16'; it must be float32, bfloat16 or float16 (did you mean bfloat16?)",
        ),
    ],
)
def test_a_malformed_variable_is_named_with_what_it_holds_and_what_is_allowed(environ, message):
    with pytest.raises(RequestError) as caught:
        Settings.read(environ)
    assert caught.value.message == message


def test_everything_wrong_is_said_at_once():
    with pytest.raises(RequestError) as caught:
        Settings.read({"SAFELIGHT_MODEL": "", "SAFELIGHT_DTYPE": "int8", "SAFELIGHT_ATTENTION": "a,b"})
    for variable in ("`SAFELIGHT_MODEL`", "`SAFELIGHT_DTYPE`", "`SAFELIGHT_ATTENTION`"):
        assert variable in caught.value.message
    assert len(caught.value.details["problems"]) == 3


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("sdpa", [("", "sdpa")]),
        ("auto", [("", "auto")]),
        ("transformer=flash2", [("transformer", "flash2")]),
        ("transformer_2.cross=sdpa", [("transformer_2.cross", "sdpa")]),
        (" transformer.joint = flash3 , vae=sdpa", [("transformer.joint", "flash3"), ("vae", "sdpa")]),
        ("vae=sdpa,flash2,vae.self=xformers", [("vae", "sdpa"), ("", "flash2"), ("vae.self", "xformers")]),
        (["sdpa", "vae=flash2"], [("", "sdpa"), ("vae", "flash2")]),
        ([], []),
    ],
)
def test_choices_keep_their_order(text, choices):
    assert parse_attention(text, FLAG) == tuple(choice(names, backend) for names, backend in choices)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("=sdpa", "'' must be COMPONENT or COMPONENT.ROLE"),
        ("vae=", "'vae=' names no backend"),
        ("=", "'=' names no backend"),
        ("sdpa,", "'' names no backend"),
        (",", "'' names no backend"),
        ("flash 2", "'flash 2' names no backend"),
        ("a=b=c", "'a=b' must be COMPONENT or COMPONENT.ROLE"),
        (".self=sdpa", "'.self' must be COMPONENT or COMPONENT.ROLE"),
        ("2d=sdpa", "'2d' must be COMPONENT or COMPONENT.ROLE"),
        ("transformer.=sdpa", "'' is no role; the roles are self, cross, joint"),
        ("transformer.Self=sdpa", "'Self' is no role; the roles are self, cross, joint"),
        ("transformer.self.0=sdpa", "'self.0' is no role"),
        ("cross=sdpa", "'cross' is a role; name its component too, as in transformer.cross"),
        ("sdpa,flash2", "everything is given both 'sdpa' and 'flash2'"),
        (["vae=sdpa", "vae=flash2"], "vae is given both 'sdpa' and 'flash2'"),
        ("vae.self=sdpa,vae.self=sdpa", "vae.self is given both 'sdpa' and 'sdpa'"),
        (
            "sliding_tile:window=3x6x6",
            "'sliding_tile:window=3x6x6' gives options to sliding_tile, and no backend takes any",
        ),
        ("transformer.self=sage:x", "'transformer.self=sage:x' gives options to sage, and no backend takes any"),
        ("vae=:x", "'vae=:x' names no backend"),
    ],
)
def test_a_choice_that_is_none(text, said):
    with pytest.raises(RequestError) as caught:
        parse_attention(text, FLAG)
    assert caught.value.message.startswith(f"{FLAG}: ")
    assert said in caught.value.message


def test_a_mapping_gives_the_same_choices():
    given = {"": "sdpa", "transformer.self": "flash3"}
    assert attention_choices(given, FLAG) == parse_attention("sdpa,transformer.self=flash3", FLAG)
    assert attention_choices("sdpa,transformer.self=flash3", FLAG) == attention_choices(given, FLAG)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vae": ""}, "'vae=' names no backend"),
        ({"vae": None}, "'vae=None' names no backend"),
        ({"vae": ["sdpa"]}, "names no backend"),
        ({"": "flash 2"}, "'flash 2' names no backend"),
        ({"transformer.sel": "sdpa"}, "did you mean self?"),
        ({"self": "sdpa"}, "'self' is a role"),
        ({7: "sdpa"}, "7 must be COMPONENT or COMPONENT.ROLE"),
        ({"vae": "sage:x=1"}, "'vae=sage:x=1' gives options to sage"),
        (["sdpa"], "['sdpa'] is no choice; give a backend's name, or a mapping such as {'transformer.self': 'sdpa'}"),
        (None, "None is no choice"),
    ],
)
def test_a_mapping_is_checked_too(given, said):
    with pytest.raises(RequestError) as caught:
        attention_choices(given, FLAG)
    assert caught.value.message.startswith(f"{FLAG}: ")
    assert said in caught.value.message


def test_switches_are_those_that_are_set(monkeypatch):
    monkeypatch.setenv("ACME_FAST", "1")
    monkeypatch.setenv("ACME_EMPTY", "")
    monkeypatch.delenv("ACME_NONE", raising=False)
    assert environment_switches(["ACME_NONE", "ACME_FAST", "ACME_EMPTY", "ACME_FAST"]) == {
        "ACME_EMPTY": "",
        "ACME_FAST": "1",
    }
    assert environment_switches([]) == {}


# Who set a value


@pytest.mark.parametrize("kind", [dict, SimpleNamespace, Namespace], ids=lambda kind: kind.__name__)
def test_settings_that_cannot_say_who_set_a_value_are_implicit(kind):
    settings = as_settings(kind(attention={"transformer": "flash2"}, dtype="float16", device=None, steps=3))
    assert settings == Settings(
        attention=((AttentionChoice(names="transformer", backend="flash2", source=UNATTRIBUTED, explicit=False),),),
        dtype=Setting("float16", UNATTRIBUTED),
    )


def test_settings_that_can_are_left_as_they_are():
    settings = Settings.read({"SAFELIGHT_ATTENTION": "sdpa"}, 'attention = "flash2"')
    assert as_settings(settings) is settings
    assert [one.explicit for layer in settings.attention for one in layer] == [True, True]
    assert as_settings({}) == as_settings(object()) == Settings()


def test_plain_settings_are_checked_too():
    with pytest.raises(RequestError) as caught:
        as_settings({"attention": "self=sdpa", "dtype": "int8", "model": 3})
    assert [problem.startswith(f"{UNATTRIBUTED}: ") for problem in caught.value.details["problems"]] == [True] * 3


def test_dx_052_settings_share_nothing_that_changes():
    environ = {"SAFELIGHT_ATTENTION": "sdpa", "SAFELIGHT_MODEL": "a"}
    given = {"attention": {"vae": "sdpa"}}
    first, plain = Settings.read(environ, "[attention]\nvae = 'flash2'"), as_settings(given)
    second = Settings.read(dict(environ), "[attention]\nvae = 'flash2'")
    before = (hash(first), hash(plain))
    environ["SAFELIGHT_ATTENTION"] = "flash2"
    given["attention"]["vae"] = "flash2"
    # What can be hashed has nothing in it that can be changed.
    assert (hash(first), hash(plain)) == before
    assert first == second
    assert plain.attention[0][0].backend == "sdpa"


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("key", ["model", "device"])
def test_dx_079_a_blank_value_is_a_slip_wherever_it_is_set(key, blank):
    for read in (
        lambda: Settings.read({f"SAFELIGHT_{key.upper()}": blank}),
        lambda: Settings.read({}, f"{key} = '{blank}'"),
    ):
        with pytest.raises(RequestError, match="or leave it unset"):
            read()


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "npu", "musa", "mps", "cpu", "CUDA", "gpu", "cuda:x"])
def test_dx_079_a_device_is_judged_alike_wherever_it_is_set(name):
    """The list of devices is the platforms' alone: what is set is passed on as it is, with where."""

    def verdict(device: Setting[str]) -> str:
        try:
            return probe_machine(device.value, torch=fake_torch(), source=device.source).platform
        except RequestError as error:
            before, source, after = error.message.partition(device.source)
            return f"{before}SOURCE{after}" if source else f"no source in {error.message}"

    by_variable = Settings.read({"SAFELIGHT_DEVICE": name}).device
    by_file = Settings.read({}, f"device = '{name}'").device
    assert verdict(by_variable) == verdict(by_file)
    assert not verdict(by_file).startswith("no source")
    known = name in {platform.name for platform in platforms()}
    assert ("isn't known" not in verdict(by_variable)) == (known or name == "cuda:x")


@pytest.mark.parametrize("backend", ["flash 2", "", "sage:x=1", "flash2;rm"])
@pytest.mark.parametrize("where", ["transformer", "transformer.self"])
def test_dx_088_what_cannot_name_a_backend_is_refused_when_it_is_set(backend, where):
    for set_it in (
        lambda: Settings.read({"SAFELIGHT_ATTENTION": f"{where}={backend}"}),
        lambda: Settings.read({}, f"[attention]\n{where} = '{backend}'"),
        lambda: attention_choices({where: backend}, FLAG),
    ):
        with pytest.raises(RequestError):
            set_it()
