"""`explain` on several ranks: their tokens, the bytes they send, and what doesn't fit, told as `generate` tells it."""

import json
from pathlib import Path

import pytest

from safelight.attention.lock import read_lock
from safelight.cli.main import main
from safelight.cli.sharing import num_bytes
from tests.rules.source import ROOT

H100 = ("--machine", "h100", "--model", "wan2.1-14b")


def shared(safelight, *arguments):
    ran = safelight("explain", *arguments, "--json")
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


def test_the_plan_is_that_of_a_rank_and_the_bytes_are_those_of_the_page(safelight) -> None:
    document = shared(safelight, *H100, "--ulysses", "4", "--ring", "2", "--size", "1280x720")
    assert list(document) == ["machine", "grid", "layers", "sharing"]
    assert document["grid"] == {"ulysses": 4, "ring": 2, "cfg": 1}
    own = {(row["component"], row["role"]): row["requirements"] for row in document["layers"]}
    assert (own["transformer", "self"]["num_heads"], own["transformer", "self"]["needs_lse"]) == (10, True)
    assert (own["transformer", "cross"]["num_heads"], own["transformer", "cross"]["needs_lse"]) == (40, False)

    sharing = document["sharing"]
    assert [sharing[name] for name in ("width", "height", "num_frames", "guidance_scale")] == [1280, 720, 81, 5.0]
    (step,) = sharing["steps"]
    tokens, rows, heads, feature = 21 * 45 * 80, 2, 40, 128 * 2
    assert step["tokens"] == [tokens // 8] * 8
    by_role = {call["role"]: call for call in step["calls"]}
    # docs/parallel.md, row by row; 3 of 4 ranks, 1 of 2 blocks.
    there = 3 / 4 * tokens / 8 * rows * (heads + 2 * heads) * feature
    back = 3 / 4 * tokens / 8 * rows * heads * feature
    around = tokens / 2 * rows * 2 * heads / 4 * feature
    assert by_role["self"] == {
        "role": "self",
        "count": 40,
        "ulysses_bytes": there + back,
        "ring_bytes": around,
        "total_bytes": there + back + around,
    }
    assert by_role["cross"]["total_bytes"] == 0
    assert step["output_bytes"] == 7 * tokens / 8 * rows * 64 * 2
    assert step["branch_bytes"] == 0
    assert step["total_bytes"] == 40 * (there + back + around) + step["output_bytes"]


def test_branches_are_split_and_exchanged(safelight) -> None:
    (step,) = shared(safelight, *H100, "--cfg-parallel", "2")["sharing"]["steps"]
    assert (step["rows"], step["tokens"], step["output_bytes"]) == (1, [21 * 30 * 52], 0)
    assert step["total_bytes"] == step["branch_bytes"] == 4 * 21 * 30 * 52 * 64


def test_each_expert_is_told_of_by_itself(safelight) -> None:
    steps = shared(safelight, "--machine", "h100", "--model", "wan2.2-14b", "--ring", "3")["sharing"]["steps"]
    assert [step["component"] for step in steps] == ["transformer", "transformer_2"]
    assert steps[0]["total_bytes"] == steps[1]["total_bytes"] > 0


def test_for_people_it_is_what_the_page_shows(safelight) -> None:
    text = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    command, _, shown = text.partition("$ safelight ")[2].partition("```")[0].partition("\n")
    ran = safelight(*command.split())
    assert shown.strip() in ran.out
    lines = ran.out.splitlines()
    assert lines[1] == "each of 8 ranks: ulysses 4 x ring 2"
    assert lines[-1].startswith("note: 8 ranks take a device each; this machine has 1 device")
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (38_700_000_000, "38.7 GB")]
)
def test_bytes_are_told_to_three_figures(count, text) -> None:
    assert num_bytes(count) == text


def test_a_cpu_s_ranks_share_it(safelight) -> None:
    ran = safelight("explain", "--device", "cpu", "--ring", "2")
    assert ran.status == 0
    assert "take a device each" not in ran.out


def test_a_kernel_without_lse_is_refused_for_a_ring_and_another_found(safelight) -> None:
    ascend = ("--machine", "ascend910b", "--model", "wan2.1-1.3b", "--ring", "2")
    ran = safelight("explain", *ascend, "--attention", "laser")
    assert (ran.status, ran.out) == (2, "")
    assert "Refused: laser: no LSE" in ran.err and "These would do: ascend" in ran.err
    rows = shared(safelight, *ascend)["layers"]
    assert {row["backend"] for row in rows if row["component"] == "transformer"} == {"ascend"}


def test_a_locked_plan_holds_the_grid(safelight) -> None:
    assert safelight("explain", "--device", "cpu", "--ulysses", "2", "--ring", "2", "--lock", "plan.json").status == 0
    assert read_lock(Path("plan.json")).grid.to_json() == {"ulysses": 2, "ring": 2, "cfg": 1}


@pytest.mark.parametrize("frames", [1, 5, 21])
@pytest.mark.parametrize("rows", [15, 5])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("way", ["--ulysses", "--ring"])
def test_dx_094_tokens_are_shared_whatever_frames_and_rows_a_latent_has(safelight, frames, rows, ranks, way) -> None:
    # A row of patches is two of the latent, 16 pixels; 14B has 40 heads.
    size = ("--size", f"48x{16 * rows}", "--frames", str(4 * (frames - 1) + 1))
    ran = safelight("explain", *H100, way, str(ranks), *size, "--json")
    assert ran.status == 0, ran.err
    (step,) = json.loads(ran.out)["sharing"]["steps"]
    assert len(step["tokens"]) == ranks and sum(step["tokens"]) == frames * rows * 3
    assert max(step["tokens"]) - min(step["tokens"]) <= 1
    shown = safelight("explain", *H100, way, str(ranks), *size).out
    assert f"a rank has {' or '.join(map(str, dict.fromkeys(step['tokens'])))} of each of 2" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ulysses", "3"),
        ("--ulysses", "8", "--ring", "2"),
        ("--ring", "200"),
        ("--cfg-parallel", "2", "--guidance", "1"),
        ("--cfg-parallel", "3"),
        ("--ulysses", "2", "--size", "65x64"),
        ("--ring", "2", "--frames", "0"),
        ("--ring", "2", "--device", "cpu:1"),
        ("--ulysses", "0", "--ring", "-1", "--attention", "sdpaa"),
    ],
)
def test_dx_035_explain_refuses_what_generate_refuses_in_the_same_words(safelight, arguments, capfd) -> None:
    told = []
    for command in (("explain",), ("generate", "a red circle")):
        capfd.readouterr()
        assert main([*command, *arguments]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        told.append(err)
    assert told[0] == told[1] != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "64x64", "--guidance", "1"), "--size, --guidance can be given where ranks share the work"),
        (("cat.mp4", "--ulysses", "0"), "--ulysses is for a plan; leave FILE out"),
        (("--model", "./nothing", "--ring", "2"), "shipped configurations are"),
        (("--model", "./nothing", "--ring", "2", "--attention", "sdpaa"), "did you mean sdpa?"),
    ],
)
def test_what_makes_no_sense_is_refused(safelight, arguments, message) -> None:
    ran = safelight("explain", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
