"""Settings from an environment, and choices of attention backends from text."""

import dataclasses

import pytest

from safelight.attention.requirements import ROLES as LAYER_ROLES
from safelight.config import ROLES, AttentionChoice, Setting, Settings, attention_choices, parse_attention
from safelight.errors import RequestError

FLAG = "`--attention` flag"


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
            choice("transformer.self", "flash3", "`SAFELIGHT_ATTENTION`"),
            choice("text_encoder", "sdpa", "`SAFELIGHT_ATTENTION`"),
        ),
        device=Setting("cuda:1", "`SAFELIGHT_DEVICE`"),
        dtype=Setting("bfloat16", "`SAFELIGHT_DTYPE`"),
    )


def test_from_environment_reads_this_process(monkeypatch):
    for name in ("SAFELIGHT_MODEL", "SAFELIGHT_ATTENTION", "SAFELIGHT_DTYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SAFELIGHT_DEVICE", "mps")
    assert Settings.from_environment() == Settings(device=Setting("mps", "`SAFELIGHT_DEVICE`"))


def test_settings_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().model = Setting("x", "y")
    with pytest.raises(TypeError):
        Settings(Setting("x", "y"))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SAFELIGHT_MODEL": ""}, "`SAFELIGHT_MODEL` is ''; give a model's path or hub id, or unset it"),
        ({"SAFELIGHT_MODEL": " "}, "`SAFELIGHT_MODEL` is ' '; give a model's path or hub id, or unset it"),
        ({"SAFELIGHT_DTYPE": "fp16"}, "`SAFELIGHT_DTYPE` is 'fp16'; it must be float32, bfloat16 or float16"),
        ({"SAFELIGHT_DTYPE": ""}, "`SAFELIGHT_DTYPE` is ''; it must be float32, bfloat16 or float16"),
        (
            {"SAFELIGHT_ATTENTION": ""},
            "`SAFELIGHT_ATTENTION`: '' names no backend; write NAME or WHERE=NAME, as in transformer.self=sdpa",
        ),
        (
            {"SAFELIGHT_ATTENTION": "transformer.sel=sdpa"},
            "`SAFELIGHT_ATTENTION`: 'transformer.sel=sdpa': 'sel' is no role; the roles are self, cross, joint",
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


@pytest.mark.parametrize("given", [{"vae": ""}, {"vae": None}, {"transformer.sel": "sdpa"}, {"self": "sdpa"}])
def test_a_mapping_is_checked_too(given):
    with pytest.raises(RequestError, match=f"^{FLAG}"):
        attention_choices(given, FLAG)
