"""What a command line may hold: every mistake is told before any work, all at once, with what would do instead."""

import json
import re
import resource
import shlex
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from safelight.cli import explain, generate

ROOT = Path(__file__).parents[2]

WRONG_VALUES = [
    ("--steps", "-1", "--steps is -1; it must be a whole number from 1 to 10000"),
    ("--steps", "0", "--steps is 0; it must be a whole number from 1 to 10000"),
    ("--steps", "1.5", "--steps is '1.5'; give a whole number"),
    ("--frames", "0", "--frames is 0; it must be a whole number of at least 1"),
    ("--frames", "nine", "--frames is 'nine'; give a whole number"),
    ("--size", "64", "--size is '64'; give WIDTHxHEIGHT"),
    ("--size", "0x64", "--size: the width is 0; it must be"),
    ("--size", "64x-8", "--size: the height is -8; it must be"),
    ("--size", "64x64x3", "--size is '64x64x3'; give WIDTHxHEIGHT"),
    ("--guidance", "nan", "--guidance is 'nan'; give a number"),
    ("--guidance", "inf", "--guidance is 'inf'; give a number"),
    ("--guidance", "-1", "--guidance is -1.0; it must be a number from 0 to 1000"),
    ("--num-outputs", "0", "--num-outputs is 0; it must be a whole number from 1 to 1000"),
    ("--num-outputs", "100000000", "--num-outputs is 100000000; it must be a whole number from 1 to 1000"),
    ("--out", "", "--out is ''; give a file's name"),
    ("--out", "-", "--out is '-'; give a file's name"),
    ("--model", "", "--model is ''; give a name"),
    ("--model", "no/such/model", "no model in no/such/model"),
    ("--device", " ", "--device is ' '; give a name"),
    ("--dtype", "float31", "--dtype is 'float31'; did you mean float32?"),
    ("--dtype", "none", "--dtype is 'none'; it can be float32, bfloat16, float16"),
    ("--attention", "", "--attention: '' names no backend"),
    ("--attention", "sdpaa", "--attention names 'sdpaa'; no backend has this name. did you mean sdpa?"),
    ("--attention", "none", "--attention names 'none'; no backend has this name."),
    ("--attention", "transformer=", "--attention: 'transformer=' names no backend"),
    ("--attention", "transformer.slef=sdpa", "'slef' is no role; the roles are self, cross, joint"),
    ("--attention", "self=sdpa", "'self' is a role; name its component too"),
    ("--seed", "none", "--seed is 'none'; give a whole number"),
]


@pytest.mark.parametrize(("flag", "value", "message"), WRONG_VALUES)
def test_a_wrong_value_is_refused_before_any_work(safelight, engine, tmp_path, flag, value, message):
    ran = safelight("generate", "a cat", f"{flag}={value}")
    assert ran.status == 2
    assert ran.err.startswith("safelight: error: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert engine.opened == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["-1", str(2**63), str(2**64 - 1), str(2**64)])
def test_dx_062_a_seed_out_of_range_is_refused_with_the_range(safelight, engine, value):
    ran = safelight("generate", "a cat", "--seed", value)
    assert ran.status == 2
    assert f"--seed is {value}; it must be a whole number from 0 to 9223372036854775807" in ran.err
    assert engine.opened == []


@pytest.mark.parametrize("value", ["1.0", "1.5", "1e3", "true", "null", "", " ", "1_000", "７", "0x10", "9" * 5000])
def test_dx_062_a_seed_that_is_no_whole_number_is_refused(safelight, value):
    ran = safelight("generate", "a cat", "--seed", value)
    assert ran.status == 2
    assert "; give a whole number such as 7\n" in ran.err
    assert len(ran.err) < 200


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32, 2**53 + 1, 2**63 - 1])
def test_dx_062_a_seed_in_range_arrives_and_returns_without_loss(safelight, engine, seed):
    ran = safelight("generate", "a cat", "--seed", str(seed), "--json")
    assert ran.status == 0
    assert engine.requests[0].seed == seed
    document = json.loads(ran.out)
    assert document["outputs"][0]["seed"] == seed
    assert document["request"]["seed"] == seed


@pytest.mark.parametrize("value", ["0", "-5", "x", "1001", "1/0", "nan", "1e999999999", "24,5", ""])
def test_dx_059_a_wrong_frame_rate_is_refused(safelight, engine, value):
    ran = safelight("generate", "a cat", f"--fps={value}")
    assert ran.status == 2
    assert ran.err.startswith(f"safelight: error: --fps is {value!r}; ")
    assert engine.opened == []


@pytest.mark.parametrize(
    ("value", "fps"),
    [("1", 1), ("8", 8), ("23.976", Fraction(2997, 125)), ("24000/1001", Fraction(24000, 1001)), ("1000", 1000)],
)
def test_dx_059_a_frame_rate_arrives_as_exact_as_it_was_written(safelight, engine, value, fps):
    ran = safelight("generate", "a cat", "--fps", value, "--frames", "17", "--json")
    assert ran.status == 0, ran.err
    assert engine.requests[0].fps == fps
    document = json.loads(ran.out)
    assert document["request"]["fps"] == str(Fraction(fps))
    assert document["outputs"][0]["fps"] == float(fps)
    assert document["outputs"][0]["num_frames"] == 17


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_dx_064_the_steps_that_were_asked_for_arrive(safelight, engine, steps):
    ran = safelight("generate", "a cat", "--steps", str(steps), "--json")
    assert engine.requests[0].num_steps == steps
    assert json.loads(ran.out)["request"]["num_steps"] == steps


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--widht", "64"], "unknown option --widht; did you mean --size WIDTHxHEIGHT?"),
        (["--widht=64"], "unknown option --widht; did you mean --size WIDTHxHEIGHT?"),
        (["--attention-backend=sagee"], "unknown option --attention-backend; did you mean --attention NAME?"),
        (["--num_outputs", "2"], "unknown option --num_outputs; did you mean --num-outputs N?"),
        (["--num-inference-steps", "2"], "did you mean --steps N?"),
        (["--Seed", "2"], "unknown option --Seed; did you mean --seed N?"),
        (["--see", "2"], "unknown option --see; did you mean --seed N?"),
        (["--jsn"], "unknown option --jsn; did you mean --json?"),
        (["--hlep"], "unknown option --hlep; did you mean --help?"),
        (["-o", "x.mp4"], "unknown option -o; did you mean --out FILE?"),
        (["--zzz"], "unknown option --zzz; `safelight generate --help` lists the options"),
    ],
)
def test_dx_077_an_unknown_option_is_refused_with_the_nearest(safelight, engine, arguments, hint):
    for order in (["a cat", *arguments], [*arguments, "a cat"]):
        ran = safelight("generate", *order)
        assert ran.status == 2
        assert hint in ran.err
        assert ran.err.count("\n") == 1
    assert engine.opened == []


@pytest.mark.parametrize("option", [o for o in generate.COMMAND.options if o.metavar and not o.repeats])
def test_dx_077_an_option_that_is_given_twice_is_refused_with_both_values(safelight, engine, option):
    for second in ("first", "second"):
        ran = safelight("generate", "a cat", option.flag, "first", option.flag, second)
        assert ran.status == 2
        assert f"{option.flag} is given 2 times: 'first', '{second}'; give it once" in ran.err
    assert engine.opened == []


@pytest.mark.parametrize("command", [generate.COMMAND, explain.COMMAND], ids=lambda command: command.name)
def test_dx_077_no_option_has_the_name_of_another_programs_option(command):
    flags = {option.flag for option in command.options} | {"-h", "--help"}
    assert not flags & {name for option in command.options for name in option.also}


def test_dx_077_documented_commands_are_accepted():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    calls = re.findall(r"(?:^|[`/ ])safelight ((?:generate|explain) [^`\n]*)", text, re.MULTILINE)
    assert calls
    for call in calls:
        name, *arguments = shlex.split(call, comments=True)
        command = {"generate": generate.COMMAND, "explain": explain.COMMAND}[name]
        if "--help" not in arguments:
            assert command.read(arguments).problems == [], call


def test_an_attention_choice_that_is_given_twice_is_refused_with_both(safelight):
    ran = safelight("generate", "a cat", "--attention", "transformer=sdpa", "--attention", "transformer=auto")
    assert ran.status == 2
    assert "transformer is given both 'sdpa' and 'auto'" in ran.err


def test_attention_choices_reach_the_engine_by_name(safelight, engine):
    arguments = ["--attention", "sdpa", "--attention", "transformer=auto", "--attention", "transformer.self=sdpa"]
    ran = safelight("generate", "a cat", *arguments)
    assert ran.status == 0, ran.err
    _, options = engine.opened[0]
    assert options["attention"] == {"": "sdpa", "transformer": "auto", "transformer.self": "sdpa"}


def test_all_problems_are_told_at_once(safelight, engine, tmp_path):
    (tmp_path / "model").write_text("no folder")
    ran = safelight(
        *("generate", "a cat", "--steps", "-1", "--seed", "-1", "--size", "64", "--fps", "x", "--attention", "sagee"),
        *("--seed", "2", "--dtype", "int8", "--guidance", "high", "--model", "model", "--frames", "0"),
    )
    assert ran.status == 2
    lines = ran.err.splitlines()
    assert lines[0] == "safelight: error: 9 problems:"
    beginnings = ["--size is '64'", "--fps is 'x'", "--guidance is 'high'", "--seed is given 2 times: '-1', '2'"]
    beginnings += ["--dtype is 'int8'", "--attention names 'sagee'", "--frames is 0", "--steps is -1", "no model in"]
    assert all(line.startswith(f"  {begin}") for line, begin in zip(lines[1:], beginnings, strict=True))
    assert engine.opened == []
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_output_and_the_model_are_checked_together(safelight, engine, tmp_path):
    (tmp_path / "there.mp4").write_text("mine")
    ran = safelight("generate", "a cat", "--out", "there.mp4", "--model", "nowhere")
    assert ran.status == 2
    assert ran.err.splitlines()[0] == "safelight: error: 2 problems:"
    assert "there.mp4 exists already" in ran.err
    assert "no model in nowhere" in ran.err
    assert (tmp_path / "there.mp4").read_text() == "mine"


def test_a_model_from_elsewhere_is_not_fetched_for_a_wrong_command_line(safelight):
    ran = safelight("generate", "a cat", "--model", "owner/name", "--steps", "0")
    assert ran.status == 2
    assert ran.err == "safelight: error: --steps is 0; it must be a whole number from 1 to 10000\n"


def test_what_is_set_wrongly_outside_is_among_the_problems(safelight, engine, monkeypatch):
    monkeypatch.setenv("SAFELIGHT_DTYPE", "int8")
    ran = safelight("generate", "a cat", "--steps", "0")
    assert ran.status == 2
    assert "  `SAFELIGHT_DTYPE` is 'int8'; it must be float32, bfloat16 or float16\n" in ran.err
    assert "  --steps is 0; " in ran.err


def test_the_model_is_the_one_asked_for_then_the_one_set_outside(safelight, engine, tmp_path, monkeypatch):
    for name in ("asked", "set"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SAFELIGHT_MODEL", "set")
    assert safelight("generate", "a cat").status == 0
    assert safelight("generate", "a cat", "--model", "asked").status == 0
    assert [model for model, _ in engine.opened] == ["set", "asked"]
    assert engine.opened[0][1]["settings"].model.value == "set"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROMPT is missing; for example: safelight generate"),
        (["a", "red", "circle"], "PROMPT is one argument, found 3; put it in quotes: 'a red circle'"),
        ([""], "PROMPT is empty; say what to generate"),
        ([" \n"], "PROMPT is empty; say what to generate"),
        (["a cat", "--seed"], "--seed needs a value: --seed N"),
        (["a cat", "--negative", "-blur"], "is written --negative=VALUE"),
        (["a cat", "--json=yes"], "--json takes no value"),
        (["a \udcff cat"], "PROMPT holds half of a character (a lone surrogate)"),
        (["a cat", "--negative", "\udcff"], "--negative holds half of a character (a lone surrogate)"),
    ],
)
def test_a_malformed_command_line_is_refused(safelight, engine, arguments, message):
    ran = safelight("generate", *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert engine.opened == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["genrate", "a cat"], "unknown command 'genrate'; did you mean generate?"),
        (["a red circle"], "unknown command 'a red circle'; the commands are generate, explain"),
        (["--verison"], "unknown option '--verison'; did you mean --version?"),
        (["--seed", "7"], "unknown option '--seed'; the command comes first"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest(safelight, arguments, message):
    ran = safelight(*arguments)
    assert ran.status == 2
    assert message in ran.err
    assert ran.out == ""


def test_values_that_begin_with_a_dash_can_be_given(safelight, engine):
    ran = safelight("generate", "--negative=-blur", "--", "--a prompt-")
    assert ran.status == 0, ran.err
    assert engine.requests[0].prompt == "--a prompt-"
    assert engine.requests[0].negative_prompt == "-blur"


def test_zero_and_nothing_are_not_the_same(safelight, engine):
    assert safelight("generate", "a cat", "--guidance", "0", "--negative", "").status == 0
    assert safelight("generate", "a cat").status == 0
    assert (engine.requests[0].guidance_scale, engine.requests[0].negative_prompt) == (0.0, "")
    assert (engine.requests[1].guidance_scale, engine.requests[1].negative_prompt) == (3.0, None)


def test_help_goes_to_standard_output_and_names_every_option(safelight):
    ran = safelight("generate", "--help")
    assert (ran.status, ran.err) == (0, "")
    for option in generate.COMMAND.options:
        assert f"\n  {option.flag}" in ran.out
    overview = safelight("--help")
    assert (overview.status, overview.err) == (0, "")
    assert "  generate " in overview.out
    assert "  explain " in overview.out


def test_without_arguments_the_overview_is_an_error(safelight):
    ran = safelight()
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == safelight("--help").out


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["explain", "-h"], ["--version"]])
def test_help_is_quick_and_imports_nothing_heavy(arguments):
    program = (
        "import sys\n"
        "from safelight.cli.main import main\n"
        f"status = main({arguments!r})\n"
        "heavy = {'torch', 'numpy', 'av', 'tqdm', 'PIL', 'diffusers', 'transformers', 'difflib'} & set(sys.modules)\n"
        "print(status, sorted(heavy), file=sys.stderr)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.stderr == "0 []\n"
    assert ran.stdout
    # The processor's time, which a busy machine doesn't stretch: the program waits for nothing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
