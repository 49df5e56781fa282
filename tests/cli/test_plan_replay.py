"""What a maintainer is sent, and what plans, results and reports are good for: replayed, told to fit, never obeyed."""

import dataclasses
import json

import pytest

from safelight.attention import declared_backends
from safelight.cli.doctor import examine
from safelight.platforms import load_machine, machine_names

HOSTILE = "a \x1b[31mred\x1b[0m\ncard"


def decisions(ran):
    assert ran.status == 0, ran.err
    return [(row["component"], row["role"], row["backend"]) for row in json.loads(ran.out)["layers"]]


def state(ran, backend):
    assert ran.status == 0, ran.err
    (row,) = (row for row in json.loads(ran.out)["backends"] if row["backend"] == backend)
    return row


@pytest.mark.parametrize("source", ["facts", "plan", "doctor", "generate", "png", "mp4"])
def test_a_machine_is_taken_from_whatever_somebody_sends(safelight, tmp_path, source):
    expected = load_machine("h100").to_json()
    if source == "facts":
        (tmp_path / "sent").write_text(json.dumps(expected))
    elif source == "plan":
        assert safelight("explain", "--machine", "h100", "--lock", "sent").status == 0
    elif source == "doctor":
        (tmp_path / "sent").write_text(safelight("doctor", "--machine", "h100", "--json").out)
    else:
        frames = "1" if source == "png" else "9"
        ran = safelight(
            "generate", "a cat", "--frames", frames, "--out", f"cat.{'png' if frames == '1' else 'mp4'}", "--json"
        )
        expected = json.loads(ran.out)["plan"]["machine"]
        if source == "generate":
            (tmp_path / "sent").write_text(ran.out)
        else:
            (tmp_path / f"cat.{source}").rename(tmp_path / "sent")
    ran = safelight("explain", "--machine", "sent", "--json")
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["machine"] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "platform is missing"),
        (b'{"machine": []}', "it holds a list, not an object"),
        (b'{"plan": 7}', "it holds a int, not an object"),
        (b'{"machine": {"platform": "cuba"}}', "platform is 'cuba'"),
        (b"\x89PNG\r\n\x1a\n", "carries no Safelight metadata"),
        (b"\x00\x00\x00\x18ftypisom", "carries no Safelight metadata"),
        (b"\xff\xfe", "isn't JSON"),
    ],
)
def test_a_file_without_a_machine_is_refused(safelight, tmp_path, content, message):
    (tmp_path / "sent").write_bytes(content)
    for command in ("explain", "doctor"):
        ran = safelight(command, "--machine", "sent")
        assert (ran.status, ran.out) == (2, "")
        assert message in ran.err


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_text_in_a_machine_file_cannot_steer_a_terminal(safelight, tmp_path, command):
    facts = load_machine("mi300x-rocm7-flash2-broken").to_json()
    facts["devices"][0]["name"] = HOSTILE
    facts["notes"] = [HOSTILE]
    facts["torch_version"] = HOSTILE
    facts["packages"]["flash_attn_2"]["import_error"] = HOSTILE
    (tmp_path / "m.json").write_text(json.dumps(facts))
    ran = (
        safelight(command, "--machine", "m.json", "--model", "wan2.1-14b")
        if command == "explain"
        else safelight(command, "--machine", "m.json")
    )
    assert ran.status == 0, ran.err
    assert all(character.isprintable() for line in ran.out.split("\n") for character in line)
    assert "\\x1b[31mred" in ran.out


@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.parametrize(
    "arguments",
    [("doctor",), ("explain", "--model", "wan2.2-14b"), ("explain", "--model", "wan2.1-14b", "--attention", "sdpa")],
    ids=" ".join,
)
def test_lines_fit(safelight, machine, arguments):
    """In 100 columns, but for one word that is longer by itself: a symbol, a file's name."""
    ran = safelight(*arguments, "--machine", machine)
    assert ran.status == 0, ran.err
    assert [line for line in ran.out.splitlines() if len(line) > 100 and " " in line.strip().split("  ")[-1]] == []


@pytest.mark.parametrize(
    ("file", "meant"),
    [("h100", "--machine h100"), ("wan2.1-14b", "--model wan2.1-14b"), ("m.JSON", "--machine m.JSON")],
)
def test_what_is_no_result_leads_to_its_option(safelight, file, meant):
    ran = safelight("explain", file)
    assert ran.status == 2
    assert ran.err == f"safelight: error: {file} isn't a PNG or MP4; did you mean {meant}?\n"


def test_a_models_folder_leads_to_its_option(safelight, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model_index.json").write_text("{}")
    assert "did you mean --model folder?" in safelight("explain", "folder").err


# doctor


@pytest.mark.parametrize("machine", machine_names())
def test_doctor_calls_usable_what_can_be_chosen_and_nothing_else(safelight, machine):
    """For a layer that every kernel takes, doctor and selection agree, whatever the machine."""
    document = json.loads(safelight("doctor", "--machine", machine, "--json").out)
    lossless = {row["backend"]: row["state"] for row in document["backends"] if row["backend"] != "sliding_tile"}
    for backend, state in lossless.items():
        ran = safelight(
            *("explain", "--machine", machine, "--model", "wan2.1-14b", "--dtype", "bfloat16"),
            *("--attention", f"transformer.self={backend}"),
        )
        assert (ran.status == 0) == (state == "usable"), (backend, state, ran.err)


def test_a_build_without_code_for_the_device_is_not_usable(safelight):
    row = state(safelight("doctor", "--machine", "rtx5090-old-flash2", "--json"), "flash2")
    assert row["state"] == "wrong build"
    assert row["reasons"] == ["flash-attn 2.7.4.post1 may lack code for sm120: 2.8.0 has it"]


@pytest.mark.parametrize("machine", machine_names())
def test_nothing_is_recommended_that_no_adapter_would_call(machine):
    for backend in declared_backends().values():
        unbuilt = dataclasses.replace(backend, load=None)
        there, here = (examine(unbuilt, load_machine(machine), runs_here=here) for here in (False, True))
        if there.state in ("wrong hardware", "broken"):
            assert here.state == there.state
        else:
            assert (here.state, here.remedy) == ("adapter not built yet", None)
            assert "adapter not built yet" not in there.reasons


def test_wrong_settings_are_a_finding(safelight, monkeypatch, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('dtype = "int8"\n')
    monkeypatch.setenv("SAFELIGHT_CONFIG", str(file))
    ran = safelight("doctor", "--device", "cpu")
    assert ran.status == 0
    assert "wrong, so no setting is used: " in ran.out
    assert "dtype is 'int8'" in ran.out
    assert f"config file: {file}\n" in ran.out
    document = json.loads(safelight("doctor", "--device", "cpu", "--json").out)
    assert document["config_file"] == str(file)
    assert ["int8" in problem for problem in document["wrong_settings"]] == [True]
    monkeypatch.setenv("SAFELIGHT_CONFIG", str(tmp_path / "none.toml"))
    assert "none.toml (not there)\n" in safelight("doctor", "--device", "cpu").out


# The lock


def test_a_wrong_lock_is_told_with_the_other_problems(safelight, engine):
    ran = safelight("generate", "a cat", "--plan", "lock.json", "--steps", "0")
    assert ran.status == 2
    assert ran.err.splitlines()[0] == "safelight: error: 2 problems:"
    assert "plan lock.json can't be read" in ran.err and "--steps is 0" in ran.err
    assert engine.opened == []


def test_changed_facts_are_told_where_the_same_kernels_run(safelight, tmp_path):
    """The driver's version alone refuses nothing, and is shown."""
    assert safelight("generate", "a cat", "--frames", "1", "--out", "cat.png", "--json").status == 0
    machine = json.loads(safelight("explain", "cat.png", "--json").out)["plan"]["machine"]
    (tmp_path / "m.json").write_text(json.dumps({**machine, "driver_version": "1.2"}))
    assert safelight("explain", "--machine", "m.json", "--lock", "plan.json").status == 0
    ran = safelight("generate", "a cat", "--plan", "plan.json")
    assert ran.status == 0
    assert "the same kernels as locked, but driver_version was 1.2, is None\n" in ran.err
