"""Measured times in selection: they order what may be taken unasked, and nothing else."""

import json

import pytest

from safelight.attention import AttentionRequirements, BackendPreference, Selection, select_backend
from safelight.attention.ranking import Measured, Ranking, Shape, Timing, changes, fingerprint, read_ranking
from safelight.platforms import PackageFacts, load_machine

H100 = load_machine("h100")
NEED = AttentionRequirements(head_dim=128, dtype="bfloat16", num_heads=12, num_kv_heads=12, equal_lengths=True)


def shape(tokens=4096, **changes):
    numbers = {"batch": 1, "queries": tokens, "keys": tokens, "num_heads": 12, "num_kv_heads": 12, "head_dim": 128}
    return Shape(**{**numbers, "dtype": "bfloat16", "causal": False, "role": "self", "mask": "none", **changes})


def ranking(*orders, machine=H100):
    """A ranking in which the backends of each (shape, names) take 1, 2, ... ms."""
    measured = tuple(
        Measured(
            shape=of,
            timings=tuple(
                Timing(backend=name, median_s=0.001 * (i + 1), num_runs=5, flops_per_s=1e12)
                for i, name in enumerate(names)
            ),
        )
        for of, names in orders
    )
    return Ranking(fingerprint=fingerprint(machine), measured=measured)


def chosen(measured, need=NEED, preference=None):
    selection = select_backend(need, H100, preference, measured=measured)
    assert Selection.from_json(json.loads(json.dumps(selection.to_json()))) == selection
    return selection.backend, selection.reason


def test_without_times_the_platform_decides() -> None:
    assert chosen(None) == ("flash3", "platform default")


def test_the_fastest_exact_dense_backend_is_taken() -> None:
    assert chosen(ranking((shape(), ("sdpa", "flash3")))) == ("sdpa", "measured fastest")
    assert chosen(ranking((shape(), ("flash3", "sdpa")))) == ("flash3", "measured fastest")


@pytest.mark.parametrize("unasked", ["sage", "sliding_tile", "gone_since"])
def test_lossy_sparse_and_unknown_ones_are_never_taken_for_their_speed(unasked) -> None:
    assert chosen(ranking((shape(), (unasked, "sdpa", "flash3")))) == ("sdpa", "measured fastest")
    assert chosen(ranking((shape(), (unasked,)))) == ("flash3", "platform default")


def test_a_fast_one_that_can_not_run_is_refused_as_ever() -> None:
    assert chosen(ranking((shape(), ("ascend", "sdpa", "flash3")))) == ("sdpa", "measured fastest")


@pytest.mark.parametrize("alone", [("sdpa",), ("flash2", "sdpa"), ("sage", "flash2")])
def test_what_was_not_timed_against_the_usual_one_does_not_take_its_place(alone) -> None:
    assert chosen(ranking((shape(), alone))) == ("flash3", "platform default")
    # Of two shapes the one in which both were timed counts.
    assert chosen(ranking((shape(), alone), (shape(512), ("flash2", "flash3")))) == ("flash2", "measured fastest")


@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        (1.0, ("flash3", "platform default")),
        (1.04, ("flash3", "platform default")),
        (1.06, ("sdpa", "measured fastest")),
    ],
)
def test_of_those_that_are_as_fast_as_any_the_usual_one_is_taken(slower, expected) -> None:
    timings = (
        Timing(backend="sdpa", median_s=0.00999, num_runs=5, flops_per_s=1e12),
        Timing(backend="flash3", median_s=0.01 * slower, num_runs=5, flops_per_s=1e12),
    )
    measured = Ranking(fingerprint=fingerprint(H100), measured=(Measured(shape=shape(), timings=timings),))
    assert chosen(measured) == expected
    assert select_backend(NEED, H100, measured=measured).measured is not None, "the times are told either way"


def test_a_layer_s_own_heads_count_before_more_work() -> None:
    own = shape(64, num_heads=12, num_kv_heads=12), ("sdpa", "flash3")
    larger = shape(8192, num_heads=40, num_kv_heads=40), ("flash3", "sdpa")
    assert chosen(ranking(larger, own)) == ("sdpa", "measured fastest")
    assert chosen(ranking(larger)) == ("flash3", "measured fastest")


def test_what_a_person_chose_is_untouched() -> None:
    asked = BackendPreference("flash3", "`--attention` flag", explicit=True)
    assert chosen(ranking((shape(), ("sdpa", "flash3"))), preference=asked) == ("flash3", None)


@pytest.mark.parametrize(
    "other",
    [{"head_dim": 64}, {"dtype": "float16"}, {"causal": True}, {"role": "cross", "keys": 512}, {"num_kv_heads": 4}],
)
def test_times_of_another_kind_of_call_say_nothing(other) -> None:
    assert chosen(ranking((shape(**other), ("sdpa", "flash3")))) == ("flash3", "platform default")


def test_of_several_shapes_the_one_with_the_most_work_counts() -> None:
    small, large = (shape(256), ("sdpa", "flash3")), (shape(32_768), ("flash3", "sdpa"))
    assert chosen(ranking(small, large)) == chosen(ranking(large, small)) == ("flash3", "measured fastest")


def test_a_changed_machine_is_named_item_by_item() -> None:
    newer = H100.replace(
        torch_version="9.9.9", packages={**H100.packages, "xformers": PackageFacts(dist="xformers", version="1.0")}
    )
    found = changes(fingerprint(H100), fingerprint(newer))
    assert f"torch {H100.torch_version} -> 9.9.9" in found
    assert any("xformers" in one and one.endswith("-> 1.0") for one in found)
    assert len(found) == 2


def test_a_package_of_unknown_version_counts_too() -> None:
    packages = {**H100.packages, "acme": PackageFacts(dist="acme", version=None)}
    assert changes(fingerprint(H100), fingerprint(H100.replace(packages=packages))) == [
        "acme none -> of unknown version"
    ]


def test_newer_times_replace_older_ones_and_those_of_what_fails_now_go() -> None:
    short, long = shape(1024), shape(4096)
    before = ranking((short, ("flash3", "sdpa")), (long, ("flash3", "sdpa", "flash2")))
    now = ranking((long, ("sdpa",)))
    together = before.updated(now, {long: ["flash3"]})
    names = {one.shape: [timing.backend for timing in one.timings] for one in together.measured}
    assert names == {short: ["flash3", "sdpa"], long: ["sdpa", "flash2"]}
    assert before.updated(ranking(), {short: ["flash3", "sdpa"]}).fitting(NEED) == before.measured[1:]
    other = ranking((long, ("sdpa",)), machine=H100.replace(torch_version="9.9.9"))
    assert before.updated(other) == other


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": {}, "measured": 3}', "\x00"])
def test_a_damaged_file_is_a_note_and_no_crash(tmp_path, text) -> None:
    file = tmp_path / "ranking.json"
    file.write_text(text)
    saved = read_ranking(file, H100)
    assert saved.ranking is None
    assert file.name in saved.note and "safelight bench attention" in saved.note


def test_a_file_of_this_machine_is_used_and_of_another_not(tmp_path) -> None:
    file = tmp_path / "ranking.json"
    made = ranking((shape(), ("sdpa", "flash3")))
    file.write_text(json.dumps(made.to_json()))
    assert read_ranking(file, H100).ranking == made
    saved = read_ranking(file, H100.replace(torch_version="9.9.9"))
    assert saved.ranking is None and "-> 9.9.9" in saved.note
