"""The config file: its form, what is refused in it, where it is, and that the document about it is right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safelight.config import DTYPES, KEYS, AttentionChoice, Setting, Settings, config_file
from safelight.errors import RequestError
from tests.rules.documents import blocks
from tests.rules.source import ROOT

DOCUMENT = ROOT / "docs/configuration.md"


def choice(names, backend, source):
    return AttentionChoice(names=names, backend=backend, source=source)


def in_file(names, backend, key, name="config.toml"):
    return choice(names, backend, f"{name}: {key}")


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ('attention = "sdpa"', [in_file("", "sdpa", "attention")]),
        ('[attention]\ndefault = "auto"', [in_file("", "auto", "attention.default")]),
        (
            '[attention]\ndefault = "sage"\nvae = "sdpa"',
            [in_file("", "sage", "attention.default"), in_file("vae", "sdpa", "attention.vae")],
        ),
        ('attention.transformer = "flash3"', [in_file("transformer", "flash3", "attention.transformer")]),
        ('[attention]\ntransformer.self = "a"', [in_file("transformer.self", "a", "attention.transformer.self")]),
        ('[attention]\ntransformer = {self = "a"}', [in_file("transformer.self", "a", "attention.transformer.self")]),
        (
            '[attention.transformer]\ndefault = "flash2"\nself = "flash3"\njoint = "a.b_c-1"',
            [
                in_file("transformer", "flash2", "attention.transformer.default"),
                in_file("transformer.self", "flash3", "attention.transformer.self"),
                in_file("transformer.joint", "a.b_c-1", "attention.transformer.joint"),
            ],
        ),
    ],
)
def test_a_file_names_everything_a_component_or_a_role(text, choices):
    assert Settings.read({}, text).attention == (tuple(choices),)


@pytest.mark.parametrize("text", ["", "# nothing\n", "[attention]\n", "[attention.transformer]\n", "attention = {}"])
def test_a_file_that_says_nothing_sets_nothing(text):
    assert Settings.read({}, text) == Settings()


def test_a_source_is_the_file_s_name_and_the_key_without_the_folder_of_whoever_runs_it():
    text = 'model = "a/b"\ndevice = "rocm"\ndtype = "float32"\n[attention]\nvae = "sdpa"\n'
    assert Settings.read({}, text, "somewhere/of/mine/fast.toml") == Settings(
        model=Setting("a/b", "fast.toml: model"),
        attention=((in_file("vae", "sdpa", "attention.vae", "fast.toml"),),),
        device=Setting("rocm", "fast.toml: device"),
        dtype=Setting("float32", "fast.toml: dtype"),
    )


def test_the_environment_is_nearer_than_the_file():
    text = 'model = "far"\ndevice = "cpu"\n[attention]\ntransformer.self = "flash3"\n'
    settings = Settings.read({"SAFELIGHT_MODEL": "near", "SAFELIGHT_ATTENTION": "sdpa"}, text)
    assert settings == Settings(
        model=Setting("near", "`SAFELIGHT_MODEL`"),
        attention=(
            (choice("", "sdpa", "`SAFELIGHT_ATTENTION`"),),
            (in_file("transformer.self", "flash3", "attention.transformer.self"),),
        ),
        device=Setting("cpu", "config.toml: device"),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "modle = 'x'",
            (
                "there is no key 'modle'; the keys are model, device, dtype, attention, check_attention "
                "(did you mean model?)"
            ),
        ),
        (
            "[transformer]",
            "there is no key 'transformer'; the keys are model, device, dtype, attention, check_attention",
        ),
        ("model = 7", 'model is 7; it must be text in quotes, such as "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"'),
        ("model = ' '", "model is ' '; give a model's path or hub id, or leave it unset"),
        ("device = true", 'device is true; it must be text in quotes, such as "cuda:1"'),
        ("device = 1979-05-27", 'device is 1979-05-27; it must be text in quotes, such as "cuda:1"'),
        ("[dtype]", 'dtype is a table; it must be text in quotes, such as "bfloat16"'),
        ("dtype = ['float32']", 'dtype is an array; it must be text in quotes, such as "bfloat16"'),
        ("dtype = 'bf16'", "dtype is 'bf16'; it must be float32, bfloat16 or float16 (did you mean bfloat16?)"),
        ("attention = 3", 'attention is 3; write a backend\'s name, as in attention = "sdpa"'),
        ("[[attention]]", 'attention is an array; write a backend\'s name, as in attention = "sdpa"'),
        (
            "attention = ''",
            "attention is '', which names no backend; write a backend's name, as in attention = \"sdpa\"",
        ),
        (
            "attention = 'vae=sdpa'",
            "attention is 'vae=sdpa', which names no backend; write a backend's name, as in attention = \"sdpa\"",
        ),
        (
            "attention.vae = 'sage:x=1'",
            (
                "attention.vae is 'sage:x=1', which gives options to sage, and no backend takes any; "
                'write a backend\'s name, as in attention.vae = "sdpa"'
            ),
        ),
        (
            "[attention.default]",
            'attention.default is a table; write a backend\'s name, as in attention.default = "sdpa"',
        ),
        (
            "[attention.vae.self]",
            'attention.vae.self is a table; write a backend\'s name, as in attention.vae.self = "sdpa"',
        ),
        (
            "[attention.vae.default]",
            'attention.vae.default is a table; write a backend\'s name, as in attention.vae.default = "sdpa"',
        ),
        ("attention.self = 'sdpa'", "attention.self: 'self' is a role; name its component too, as in transformer.self"),
        (
            "attention.vae.slef = 'sdpa'",
            (
                "attention.vae.slef: 'slef' is no role; the roles are self, cross, joint (did you mean self?); "
                "default is for the rest"
            ),
        ),
        (
            "attention.'transformer.self' = 'sdpa'",
            "attention has 'transformer.self' in quotes, which is one key; write transformer.self without quotes",
        ),
        (
            "attention.'' = 'sdpa'",
            "attention.: '' must be COMPONENT or COMPONENT.ROLE, as in transformer or transformer.self",
        ),
        (
            "attention.2d = 'sdpa'",
            "attention.2d: '2d' must be COMPONENT or COMPONENT.ROLE, as in transformer or transformer.self",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_file_and_what_is_allowed(text, problem):
    with pytest.raises(RequestError) as caught:
        Settings.read({}, text, "my/config.toml")
    assert caught.value.message == f"my/config.toml: {problem}"
    assert caught.value.details["problems"] == [caught.value.message]


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("# mine\nmodel = wan\n", 2, "model = wan"),
        ('device = "cpu"\ndevice = "cuda"', 2, 'device = "cuda"'),
        ('[attention]\ntransformer = "flash2"\ntransformer.self = "flash3"\n', 3, 'transformer.self = "flash3"'),
        ('[attention]\ntransformer = "flash2"\n\n[attention.transformer]\n', 4, "[attention.transformer]"),
        ("[attention]\nvae = 'sdpa'\n[attention]\n", 3, "[attention]"),
    ],
)
def test_what_is_no_toml_or_is_said_twice_is_shown_with_its_line(text, line, shown):
    with pytest.raises(RequestError) as caught:
        Settings.read({}, text, "my/config.toml")
    assert caught.value.message.startswith("my/config.toml isn't TOML: ")
    assert f"at line {line}, " in caught.value.message
    assert caught.value.message.endswith(f": {shown}")


def test_what_ends_too_early_is_no_toml():
    with pytest.raises(RequestError, match=r"^config.toml isn't TOML: .*at end of document"):
        Settings.read({}, 'model = """x')


def test_everything_wrong_in_file_and_environment_is_said_at_once():
    text = "modle = 'x'\ndtype = 16\n[attention]\nself = 'sdpa'\nvae = 1\n"
    with pytest.raises(RequestError) as caught:
        Settings.read({"SAFELIGHT_DTYPE": "int8", "SAFELIGHT_ATTENTION": ","}, text)
    problems = caught.value.details["problems"]
    beginnings = ["`SAFELIGHT_DTYPE` is", "`SAFELIGHT_ATTENTION`: "]
    beginnings += [
        f"config.toml: {key}" for key in ("there is no key", "dtype is 16", "attention.self:", "attention.vae")
    ]
    assert [problem[: len(begin)] for problem, begin in zip(problems, beginnings, strict=True)] == beginnings


TOML_LIKE = st.lists(
    st.sampled_from(
        ["attention", "transformer", "self", "model", "default", ".", "=", "'x'", "\n", "[", "]", "{", "}", "7", "#"]
    )
    | st.text(max_size=3)
).map("".join)


@given(TOML_LIKE, st.text(), st.text())
def test_whatever_stands_there_is_read_or_refused(text, attention, dtype):
    """Never anything else than settings or a RequestError that lists problems."""
    problems, settings = [], None
    try:
        settings = Settings.read({"SAFELIGHT_ATTENTION": attention, "SAFELIGHT_DTYPE": dtype}, text)
    except RequestError as error:
        problems = error.details["problems"]
    assert (settings is None) == bool(problems)
    if settings is not None:
        assert settings.dtype.value in DTYPES
        assert all(layer and all(one.explicit for one in layer) for layer in settings.attention)


# Where the file is, and reading this process


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"HOME": "/h"}, "/h/.config/safelight/config.toml"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "/x/safelight/config.toml"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": ""}, "/h/.config/safelight/config.toml"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": "relative"}, "/h/.config/safelight/config.toml"),
        ({"XDG_CONFIG_HOME": "/x"}, "/x/safelight/config.toml"),
        ({"USERPROFILE": "/u"}, "/u/.config/safelight/config.toml"),
        ({"HOME": "", "XDG_CONFIG_HOME": ""}, None),
        ({}, None),
        ({"SAFELIGHT_CONFIG": "fast.toml", "HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "fast.toml"),
    ],
)
def test_where_the_config_file_is(environ, path):
    assert config_file(environ) == (None if path is None else Path(path))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A process without settings, whose home is an empty folder."""
    for name in [name for name in os.environ if name.startswith("SAFELIGHT_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write_config(home: Path, text: str | bytes) -> Path:
    path = home / ".config/safelight/config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_from_environment_reads_this_process_and_its_file(home, monkeypatch):
    assert Settings.from_environment() == Settings()
    assert list(home.iterdir()) == []

    monkeypatch.setenv("SAFELIGHT_DEVICE", "mps")
    assert Settings.from_environment() == Settings(device=Setting("mps", "`SAFELIGHT_DEVICE`"))

    # As an editor on Windows writes it: a byte order mark, and both characters at a line's end.
    write_config(home, b'\xef\xbb\xbfdevice = "cpu"\r\ndtype = "float16"\r\n')
    assert Settings.from_environment() == Settings(
        device=Setting("mps", "`SAFELIGHT_DEVICE`"), dtype=Setting("float16", "config.toml: dtype")
    )


def test_a_named_file_is_read_instead(home, monkeypatch):
    write_config(home, 'device = "cpu"')
    (home / "fast.toml").write_text('device = "cuda:1"')
    monkeypatch.setenv("SAFELIGHT_CONFIG", "~/fast.toml")
    assert Settings.from_environment() == Settings(device=Setting("cuda:1", "fast.toml: device"))
    monkeypatch.setenv("SAFELIGHT_CONFIG", os.devnull)
    assert Settings.from_environment() == Settings()


def problem_here() -> str:
    with pytest.raises(RequestError) as caught:
        Settings.from_environment()
    (problem,) = caught.value.details["problems"]
    assert caught.value.message == problem
    return problem


def test_a_named_file_must_be_there(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("SAFELIGHT_CONFIG", "no.toml")
    assert problem_here() == (
        "`SAFELIGHT_CONFIG` is 'no.toml'; no.toml can't be read: No such file or directory; "
        "name a TOML file, or unset it"
    )
    monkeypatch.setenv("SAFELIGHT_CONFIG", ".")
    assert "can't be read: Is a directory" in problem_here()
    for blank in ("", " "):
        monkeypatch.setenv("SAFELIGHT_CONFIG", blank)
        assert problem_here() == f"`SAFELIGHT_CONFIG` is {blank!r}; name a TOML file, or unset it"
    monkeypatch.setenv("SAFELIGHT_DTYPE", "int8")
    with pytest.raises(RequestError) as caught:
        Settings.from_environment()
    assert len(caught.value.details["problems"]) == 2
    assert list(home.iterdir()) == []


def test_a_file_that_is_there_must_be_readable(home):
    path = write_config(home, b"model = '\xff'")
    assert problem_here() == f"{path} isn't UTF-8 text: byte 9 is wrong"
    path.unlink()
    path.symlink_to("nowhere")
    assert problem_here() == (f"{path} can't be read: No such file or directory; make it a readable file, or remove it")
    path.unlink()
    path.mkdir()
    assert f"{path} can't be read: Is a directory" in problem_here()


@pytest.mark.parametrize("spoil", ["unset", "empty", "missing", "file", "closed"])
def test_dx_112_a_home_that_is_none_holds_no_settings(home, monkeypatch, spoil):
    """Nothing was asked for there, so nothing fails; and nothing is made."""
    (home / "file").write_text("")
    closed = home / "closed"
    write_config(closed, 'device = "cpu"')
    lstat = os.lstat

    def of_another_user(path, **options):
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return lstat(path, **options)

    # Not by the folder's mode: who runs the tests may be allowed anything.
    monkeypatch.setattr(os, "lstat", of_another_user)
    if spoil == "unset":
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", "" if spoil == "empty" else str(home / spoil))
    assert Settings.from_environment() == Settings()
    assert sorted(path.name for path in home.iterdir()) == ["closed", "file"]


def test_dx_112_settings_cost_no_toml_reader_where_there_is_no_file(home):
    code = (
        "import sys\nfrom safelight.config import Settings\nSettings.from_environment()\n"
        "print(sorted({'tomllib', 'difflib', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# The document


def test_the_document_s_example_is_read_as_it_says():
    (example,) = [block.code for block in blocks(DOCUMENT) if block.language == "toml" and "model =" in block.code]
    settings = Settings.read({}, example)
    assert settings == Settings(
        model=Setting("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "config.toml: model"),
        device=Setting("cuda:1", "config.toml: device"),
        dtype=Setting("bfloat16", "config.toml: dtype"),
        attention=(
            (
                in_file("", "auto", "attention.default"),
                in_file("text_encoder", "sdpa", "attention.text_encoder"),
                in_file("transformer", "flash2", "attention.transformer.default"),
                in_file("transformer.self", "flash3", "attention.transformer.self"),
            ),
        ),
    )


def test_every_other_piece_of_toml_in_the_document_is_read():
    pieces = [block.code for block in blocks(DOCUMENT) if block.language == "toml"]
    assert len(pieces) > 1
    assert [Settings.read({}, piece) == Settings() for piece in pieces] == [False] * len(pieces)


def test_the_document_names_every_variable_and_key():
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `SAFELIGHT_")]
    assert {(variable.strip(" `"), key.strip(" `")) for variable, key in rows} == {
        *((f"SAFELIGHT_{key.upper()}", key) for key in KEYS),
        ("SAFELIGHT_CONFIG", ""),
    }


def test_the_document_s_variables_are_read_as_they_stand():
    commands = [command for block in blocks(DOCUMENT) if block.language == "bash" for command in block.commands]
    exports = dict(
        command.removeprefix("export ").split("=", 1) for command in commands if command.startswith("export ")
    )
    assert {"SAFELIGHT_ATTENTION"} <= set(exports)
    assert Settings.read({name: value.strip('"') for name, value in exports.items()}) != Settings()


@pytest.mark.slow
def test_the_document_s_program_runs(tmp_path):
    (program,) = [block.code for block in blocks(DOCUMENT) if block.language == "python"]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("text_encoder: self x"), done.stdout
    assert "(`forced_attention` scope)" in done.stdout
