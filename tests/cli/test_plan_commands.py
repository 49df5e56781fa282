"""`explain` for plans, `facts`, `doctor` and the plan lock: what they print, and what they refuse."""

import json
import resource
import subprocess
import sys

import pytest

from safelight.attention import declared_backends
from safelight.cli.main import main
from safelight.planning import published_models
from safelight.platforms import load_machine, machine_names


@pytest.fixture
def program(safelight, capfd):
    """The program with its real engine, in the same empty place as `safelight`."""

    def run(*arguments):
        capfd.readouterr()
        status = main(list(arguments))
        out, err = capfd.readouterr()
        return status, out, err

    return run


def planned(safelight, *arguments):
    ran = safelight("explain", *arguments, "--json")
    assert ran.status == 0, ran.err
    return {(row["component"], row["role"]): row for row in json.loads(ran.out)["layers"]}


# explain


def test_a_plan_as_json_has_the_public_shape(safelight):
    document = json.loads(safelight("explain", "--machine", "h100", "--json").out)
    assert list(document) == ["machine", "layers"]
    assert document["machine"] == load_machine("h100").to_json()
    columns = ["component", "role", "count", "backend", "reason", "preference", "requirements", "rejected"]
    assert [list(row) for row in document["layers"]] == [columns] * 4
    (reason,) = document["layers"][0]["rejected"][0]["reasons"]
    assert list(reason) == ["kind", "detail"]


def test_a_plan_for_people(safelight):
    ran = safelight("explain", "--model", "wan2.1-14b", "--machine", "mi300x-rocm7-aiter")
    lines = ran.out.splitlines()
    assert (ran.status, ran.err) == (0, "")
    assert lines[0].startswith("rocm gfx942 (AMD Instinct MI300X), torch 2.13.0+rocm7.1, HIP 7.1")
    assert [line.split()[:5] for line in lines[2:7]] == [
        ["component", "role", "layers", "dtype", "backend"],
        ["text_encoder", "self", "24", "bfloat16", "sdpa"],
        ["transformer", "self", "40", "bfloat16", "aiter"],
        ["transformer", "cross", "40", "bfloat16", "aiter"],
        ["vae", "self", "1", "float32", "sdpa"],
    ]
    assert "refused for text_encoder.self" in lines
    assert "  aiter   capability: no mask bias (takes no mask at all)" in lines
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.parametrize("model", [None, *published_models()])
def test_every_model_has_a_plan_on_every_described_machine(safelight, machine, model):
    rows = planned(safelight, "--machine", machine, *(() if model is None else ("--model", model)))
    assert {row["requirements"]["dtype"] for row in rows.values()}
    assert {component for component, _ in rows} >= {"text_encoder", "transformer", "vae"}


def test_without_a_machine_it_plans_for_this_one(safelight):
    ran = safelight("explain", "--device", "cpu", "--json")
    document = json.loads(ran.out)
    assert document["machine"]["platform"] == "cpu"
    assert {row["backend"] for row in document["layers"]} == {"sdpa"}


def test_settings_count_and_are_named(safelight, monkeypatch):
    monkeypatch.setenv("SAFELIGHT_ATTENTION", "transformer.self=sdpa")
    monkeypatch.setenv("SAFELIGHT_MODEL", "wan2.1-1.3b")
    rows = planned(safelight, "--machine", "h200", "--attention", "transformer.cross=flash2", "--dtype", "float16")
    assert rows["transformer", "self"]["count"] == 30
    assert rows["transformer", "self"]["preference"]["source"] == "`SAFELIGHT_ATTENTION`"
    assert rows["transformer", "cross"]["preference"]["source"] == "`--attention` flag"
    assert rows["transformer", "cross"]["requirements"]["dtype"] == "float16"


def test_sage_where_it_is_serves_the_transformer_and_leaves_the_text_encoder(safelight):
    rows = planned(safelight, "--machine", "rtx4090", "--model", "wan2.1-14b", "--attention", "sage")
    assert rows["transformer", "self"]["backend"] == rows["transformer", "cross"]["backend"] == "sage"
    assert rows["text_encoder", "self"]["backend"] == "sdpa"
    assert rows["text_encoder", "self"]["reason"] == "not required for text_encoder"


def test_sage_for_the_text_encoder_by_name_is_refused(safelight):
    ran = safelight("explain", "--machine", "rtx4090", "--model", "wan2.1-14b", "--attention", "text_encoder=sage")
    assert (ran.status, ran.out) == (2, "")
    assert "no attention backend for text_encoder.self" in ran.err
    assert "no mask bias" in ran.err and "`--attention` flag" in ran.err
    assert "pick one with --attention text_encoder.self=sdpa" in ran.err


def test_laser_serves_self_attention_and_cross_falls_back_dense(safelight):
    ascend = ("--machine", "ascend910b", "--model", "wan2.1-14b")
    rows = planned(safelight, *ascend, "--attention", "laser")
    assert rows["transformer", "self"]["backend"] == "laser"
    cross = rows["transformer", "cross"]
    assert (cross["backend"], cross["reason"]) == ("ascend", "dense cross-attention fallback")
    ran = safelight("explain", *ascend, "--attention", "transformer.cross=laser")
    assert ran.status == 2
    assert "no role cross (made for self-attention alone)" in ran.err


def test_a_misspelt_component_names_those_there_are(safelight, engine):
    for command in (("explain", "--machine", "h100"), ("generate", "a cat")):
        ran = safelight(*command, "--attention", "transfomer=sdpa")
        assert ran.status == 2
        assert "names transfomer, which this model doesn't have (did you mean transformer?)" in ran.err
        assert "transformer.cross, transformer.self" in ran.err
    assert engine.opened == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--machine", "h1000"), "machine 'h1000' is neither a file nor shipped, did you mean 'h100'?"),
        (("--machine", "h100", "--device", "cpu"), "--device names a device of this machine, and --machine another"),
        (("--overwrite",), "--overwrite is for --lock FILE"),
        (("--model", "./wan2.1-14"), "shipped configurations are wan2.1-1.3b"),
        (("--machine", "h100", "--dtype", "int8"), "--dtype is 'int8'"),
        (("--machine", "h100", "--attention", "sdpaa"), "did you mean sdpa?"),
        (("cat.mp4", "--machine", "h100"), "--machine is for a plan; leave FILE out"),
        (("machine.json",), "did you mean --machine machine.json?"),
    ],
)
def test_what_cannot_be_planned_is_refused(safelight, arguments, message):
    ran = safelight("explain", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err


def test_explain_for_a_machine_file_is_quick_and_imports_no_torch(tmp_path):
    """In processor time, which a busy machine stretches little; the best of three."""
    (tmp_path / "m.json").write_text(json.dumps(load_machine("mi300x-rocm7-aiter").to_json()))
    arguments = ["explain", "--model", "wan2.1-14b", "--machine", str(tmp_path / "m.json"), "--json"]
    program = (
        "import sys\n"
        "from safelight.cli.main import main\n"
        f"status = main({arguments!r})\n"
        "heavy = {'torch', 'numpy', 'av', 'PIL', 'diffusers', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "print(status, sorted(heavy), file=sys.stderr)\n"
    )
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert ran.stderr == "0 []\n"
    assert min(taken) < 0.5


# facts


def test_facts_replay_the_same_decisions(safelight, tmp_path):
    ran = safelight("facts", "--device", "cpu")
    assert ran.status == 0
    (tmp_path / "here.json").write_text(ran.out)
    facts = json.loads(ran.out)
    assert (facts["platform"], load_machine(tmp_path / "here.json").to_json()) == ("cpu", facts)
    here, replayed = planned(safelight, "--device", "cpu"), planned(safelight, "--machine", "here.json")
    assert {kind: row["backend"] for kind, row in here.items()} == {k: row["backend"] for k, row in replayed.items()}


def test_facts_takes_no_argument(safelight):
    ran = safelight("facts", "here")
    assert ran.status == 2
    assert "facts takes options alone, found 'here'" in ran.err


# doctor


@pytest.mark.parametrize("machine", machine_names())
def test_doctor_has_a_state_for_every_backend(safelight, machine):
    ran = safelight("doctor", "--machine", machine, "--json")
    document = json.loads(ran.out)
    assert sorted(row["backend"] for row in document["backends"]) == sorted(declared_backends())
    states = {row["backend"]: row["state"] for row in document["backends"]}
    assert states["sdpa"] == "usable"
    assert "adapter not built yet" not in states.values()
    for row in document["backends"]:
        assert bool(row["reasons"]) == (row["state"] != "usable")
        assert (row["remedy"] is not None) == (row["state"] in ("not installed", "broken", "too old"))


@pytest.mark.parametrize(
    ("machine", "backend", "state", "said"),
    [
        ("h100", "flash3", "usable", ""),
        ("h100", "sage3", "wrong hardware", "this device is sm90"),
        ("a100", "flash2", "not installed", "package flash-attn is not installed"),
        ("mi300x-rocm7-flash2-broken", "flash2", "broken", "package flash_attn is broken: ImportError: "),
        ("mi300x-rocm7", "flash3", "wrong hardware", "this machine is rocm"),
    ],
)
def test_doctor_tells_the_states_apart(safelight, machine, backend, state, said):
    document = json.loads(safelight("doctor", "--machine", machine, "--json").out)
    (row,) = (row for row in document["backends"] if row["backend"] == backend)
    assert row["state"] == state
    assert said in "; ".join(row["reasons"])
    text = safelight("doctor", "--machine", machine).out
    assert [line.split()[0] for line in text.splitlines() if line.startswith(f"{backend} ")] == [backend]


def test_doctor_here_tells_settings_and_adapters(safelight, monkeypatch):
    monkeypatch.setenv("SAFELIGHT_DTYPE", "float32")
    monkeypatch.setenv("SAFELIGHT_ATTENTION", "vae=sdpa")
    ran = safelight("doctor", "--device", "cpu")
    assert ran.status == 0
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["sdpa", "usable"] in rows
    assert ["dtype", "float32", "`SAFELIGHT_DTYPE`"] in rows
    assert ["attention", "vae", "sdpa", "`SAFELIGHT_ATTENTION`"] in rows
    assert any(row[:5] == ["sliding_tile", "adapter", "not", "built", "yet"] for row in rows)


# The lock


@pytest.fixture
def lock(safelight):
    """A plan for the demo on this CPU, locked."""
    assert safelight("explain", "--device", "cpu", "--lock", "plan.json").status == 0
    return "plan.json"


def test_a_lock_is_the_plan_and_is_not_overwritten_unless_told(safelight, tmp_path, lock):
    document = json.loads((tmp_path / lock).read_text())
    assert document == json.loads(safelight("explain", "--device", "cpu", "--json").out)
    ran = safelight("explain", "--device", "cpu", "--lock", lock)
    assert ran.status == 2
    assert "plan.json exists already" in ran.err
    assert safelight("explain", "--machine", "h100", "--lock", lock, "--overwrite").status == 0
    assert json.loads((tmp_path / lock).read_text())["machine"]["platform"] == "cuda"
    assert safelight("explain", "--machine", "h100", "--lock", "no/such/plan.json").status == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_generate_hands_the_lock_to_the_engine(safelight, engine, lock):
    assert safelight("generate", "a cat", "--plan", lock).status == 0
    ((_, options),) = engine.opened
    assert {row.selection.backend for row in options["plan_lock"].layers} == {"sdpa"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "plan lock.json can't be read: No such file or directory"),
        ("{", "plan lock.json isn't JSON"),
        ("{}", "plan lock.json isn't a plan that this version knows"),
        ("[]", "plan lock.json isn't a plan that this version knows"),
    ],
)
def test_a_lock_that_is_none_is_refused(safelight, engine, tmp_path, text, message):
    if text is not None:
        (tmp_path / "lock.json").write_text(text)
    ran = safelight("generate", "a cat", "--plan", "lock.json")
    assert (ran.status, engine.opened) == (2, [])
    assert message in ran.err
    assert "write one with safelight explain --lock FILE" in ran.err


@pytest.mark.slow
def test_a_plan_that_would_differ_does_not_run(program, tmp_path, lock):
    document = json.loads((tmp_path / lock).read_text())
    for row in document["layers"]:
        if row["role"] == "cross":
            row["backend"] = "flash2"
    document["machine"]["torch_version"] = "2.9.0"
    (tmp_path / lock).write_text(json.dumps(document))
    asked = ("generate", "a red circle", "--device", "cpu", "--steps", "1", "--out", "a.mp4", "--plan", lock)
    status, out, err = program(*asked)
    assert (status, out) == (2, "")
    assert "the attention plan isn't the locked one; lock it anew with safelight explain --lock FILE" in err
    assert "transformer.cross (head_dim 64, float32, 4 heads): locked x5 flash2, now x5 sdpa" in err
    assert "machine: torch_version was 2.9.0, is " in err
    assert "transformer.self" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [lock]
    assert program("explain", "--device", "cpu", "--lock", lock, "--overwrite")[0] == 0
    assert program(*asked)[0] == 0
