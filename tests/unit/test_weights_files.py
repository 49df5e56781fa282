"""Which files hold a component's weights: one documented preference, whatever else lies in the folder."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from safelight.errors import CheckpointError
from safelight.weights.files import WeightFiles, find_weights, read_headers

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
STEM = "diffusion_pytorch_model"
NAMES = ("a", "b", "c")


def tensors(value: float) -> dict[str, Any]:
    return {name: np.full((4, 2), value + number / 8, np.float32) for number, name in enumerate(NAMES)}


def write_single(folder: Path, value: float, variant: str = "", stem: str = STEM) -> None:
    save_file(tensors(value), folder / f"{stem}{variant}.safetensors")


def write_shards(folder: Path, value: float, variant: str = "", stem: str = STEM, *, is_old: bool = False) -> Path:
    """One tensor a shard. Variants are spelled before or after the shard's number, by the writer's release."""
    before, after = (variant, "") if is_old else ("", variant)
    weight_map = {}
    for number, (name, array) in enumerate(tensors(value).items(), start=1):
        weight_map[name] = f"{stem}{before}-{number:05}-of-{len(NAMES):05}{after}.safetensors"
        save_file({name: array}, folder / weight_map[name])
    index = folder / f"{stem}.safetensors.index{variant}.json"
    index.write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": weight_map}))
    return index


def loaded(files: WeightFiles) -> float:
    """The value that the chosen files were filled with."""
    values: dict[str, Any] = {}
    for file in files.files:
        values.update(load_file(file))
    assert values.keys() == set(NAMES)
    assert read_headers(files).keys() == set(NAMES)
    return float(values["a"][0, 0])


def refusal(folder: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        find_weights(folder, **options)
    assert str(folder) in caught.value.message
    return caught.value


WRITERS = {
    "plain": lambda folder: write_single(folder, 1),
    "fp16": lambda folder: write_single(folder, 2, ".fp16"),
    "bin": lambda folder: (folder / f"{STEM}.bin").write_bytes(b"\x80\x02 a pickle"),
    "sharded": lambda folder: write_shards(folder, 4),
    "fp16 sharded": lambda folder: write_shards(folder, 5, ".fp16"),
    "quantised": lambda folder: write_single(folder, 6, "_fp8"),
}
COMBINATIONS = [
    combination for count in range(len(WRITERS) + 1) for combination in itertools.combinations(WRITERS, count)
]


def expected(present: tuple[str, ...], variant: str | None) -> float | str:
    """The value that is loaded, or a part of the refusal."""
    single, sharded = ("plain", "sharded") if variant is None else ("fp16", "fp16 sharded")
    values = {"plain": 1.0, "fp16": 2.0, "sharded": 4.0, "fp16 sharded": 5.0}
    if single in present and sharded in present:
        return "ambiguous"
    return next((values[kind] for kind in (single, sharded) if kind in present), "no weights")


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("present", COMBINATIONS, ids=lambda present: "+".join(present) or "nothing")
def test_dx_097_the_choice_depends_on_what_is_there_and_on_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...], variant: str | None
) -> None:
    outcomes = []
    listdir = os.listdir
    for order in (1, -1):
        folder = tmp_path / f"order{order}" / "transformer"
        folder.mkdir(parents=True)
        for kind in present[::order]:
            WRITERS[kind](folder)
        monkeypatch.setattr(os, "listdir", lambda path, order=order: sorted(listdir(path))[::order])
        wanted = expected(present, variant)
        if isinstance(wanted, str):
            message = refusal(folder, variant=variant).message
            assert wanted in message
            outcomes.append(message.replace(str(folder), ""))
            continue
        files = find_weights(folder, variant=variant)
        assert loaded(files) == wanted
        notes = "\n".join(files.notes)
        assert (f"{STEM}.bin is ignored: pickle" in notes) == ("bin" in present)
        assert (f"{STEM}_fp8.safetensors is ignored" in notes) == ("quantised" in present)
        chosen = {file.name for file in files.files} | ({files.index.name} if files.index else set())
        assert len(files.notes) == len(set(listdir(folder)) - chosen)
        outcomes.append(notes + " ".join(file.name for file in files.files))
    assert outcomes[0] == outcomes[1]


def test_dx_097_the_refusal_of_an_ambiguous_folder_names_both_and_a_difference(tmp_path: Path) -> None:
    write_single(tmp_path, 1)
    write_shards(tmp_path, 4)
    error = refusal(tmp_path)
    assert f"{STEM}.safetensors and {STEM}.safetensors.index.json are both there" in error.message
    assert "'a' has other values in" in error.message
    assert error.details["candidates"] == [f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"]


def test_dx_097_a_tensor_that_only_one_of_the_two_has_is_a_difference(tmp_path: Path) -> None:
    write_shards(tmp_path, 1)
    save_file({**tensors(1), "d": np.ones(1, np.float32)}, tmp_path / f"{STEM}.safetensors")
    assert f"'d' is only in {STEM}.safetensors" in refusal(tmp_path).message


def test_dx_097_the_same_weights_in_both_forms_are_no_ambiguity(tmp_path: Path) -> None:
    write_single(tmp_path, 1)
    write_shards(tmp_path, 1)
    files = find_weights(tmp_path)
    assert [file.name for file in files.files] == [f"{STEM}.safetensors"]
    assert len(files.notes) == 4
    assert all(note.endswith(f"the weights are those of {STEM}.safetensors") for note in files.notes)


@pytest.mark.parametrize("is_old", [True, False])
def test_dx_097_the_index_of_the_variant_alone(tmp_path: Path, is_old: bool) -> None:
    write_shards(tmp_path, 5, ".fp16", is_old=is_old)
    files = find_weights(tmp_path, variant="fp16")
    assert loaded(files) == 5.0
    assert files.notes == ()
    assert files.index == tmp_path / f"{STEM}.safetensors.index.fp16.json"
    assert "there is variant 'fp16': ask for it by name" in refusal(tmp_path).message


@pytest.mark.parametrize("variant", ["fp16", "../fp16", "fp16/x"])
def test_dx_097_an_asked_variant_is_never_swapped_for_the_plain_one(tmp_path: Path, variant: str) -> None:
    write_single(tmp_path, 1)
    message = refusal(tmp_path, variant=variant).message
    assert f"neither {STEM}.{variant}.safetensors nor {STEM}.safetensors.index.{variant}.json is there" in message
    assert "there is the plain variant" in message


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "pytorch_model.bin", "model.ckpt", "model.pt"])
def test_dx_097_a_pickle_alone_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    message = refusal(tmp_path).message
    assert f"{name} is a pickle file, which runs code when it is opened" in message
    assert "convert it to safetensors" in message


def test_a_text_encoder_has_another_stem(tmp_path: Path) -> None:
    write_single(tmp_path, 1, stem="model")
    assert loaded(find_weights(tmp_path, "model")) == 1.0
    assert "model.safetensors has another name" in refusal(tmp_path).message


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, 4).unlink()
    assert f"needs its index, {STEM}.safetensors.index.json" in refusal(tmp_path).message


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "vae").message == f"{tmp_path / 'vae'}: missing"


def test_dx_098_a_hub_snapshot_of_symlinks_to_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "0123" / "transformer", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_shards(snapshot, 4)
    for number, name in enumerate(sorted(os.listdir(snapshot))):
        shutil.move(snapshot / name, blobs / str(number))
        (snapshot / name).symlink_to(f"../../../blobs/{number}")
    assert loaded(find_weights(snapshot)) == 4.0


# Shards that are missing, broken or too many.


def shard(folder: Path, number: int) -> Path:
    return folder / f"{STEM}-{number:05}-of-{len(NAMES):05}.safetensors"


def test_dx_016_a_deleted_shard_is_named(tmp_path: Path) -> None:
    index = write_shards(tmp_path, 4)
    shard(tmp_path, 2).unlink()
    error = refusal(tmp_path)
    assert error.message.startswith(f"{index}: names shards that are missing: {shard(tmp_path, 2).name}")
    assert error.details["missing"] == [shard(tmp_path, 2).name]
    write_single(tmp_path, 1)
    assert f"remove the index to load {STEM}.safetensors" in refusal(tmp_path).message


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


BREAKS = {
    "truncated": (cut, "truncated: "),
    "zero bytes": (lambda file: file.write_bytes(b""), "empty (zero bytes)"),
    "git-lfs pointer": (lambda file: file.write_text(POINTER), "a git-lfs pointer"),
    "bad header": (lambda file: file.write_bytes(b"<html>not found</html>"), "bad header"),
    "broken link": (lambda file: (file.unlink(), file.symlink_to("nowhere")), "missing: a symlink to nowhere"),
}


@pytest.mark.parametrize(("damage", "problem"), BREAKS.values(), ids=BREAKS.keys())
def test_dx_016_a_broken_shard_is_named_with_what_is_wrong(tmp_path: Path, damage: Any, problem: str) -> None:
    write_shards(tmp_path, 4)
    damage(shard(tmp_path, 2))
    with pytest.raises(CheckpointError) as caught:
        read_headers(find_weights(tmp_path))
    assert caught.value.message.startswith(f"{shard(tmp_path, 2)}: {problem}")
    assert "\n" not in caught.value.message


def test_dx_016_all_broken_shards_are_named_at_once(tmp_path: Path) -> None:
    write_shards(tmp_path, 4)
    cut(shard(tmp_path, 1))
    shard(tmp_path, 3).write_text(POINTER)
    with pytest.raises(CheckpointError) as caught:
        read_headers(find_weights(tmp_path))
    problems = caught.value.details["problems"]
    assert [problem.split(": ")[0] for problem in problems] == [str(shard(tmp_path, 1)), str(shard(tmp_path, 3))]


def test_dx_016_a_shard_that_the_index_does_not_name_is_ignored_with_a_note(tmp_path: Path) -> None:
    write_shards(tmp_path, 4)
    extra = f"{STEM}-00004-of-00004.safetensors"
    save_file({"a": np.zeros((4, 2), np.float32)}, tmp_path / extra)
    files = find_weights(tmp_path)
    assert files.notes == (f"{extra} is ignored: the weights are those of {STEM}.safetensors.index.json",)
    assert loaded(files) == 4.0


def test_dx_016_an_index_that_is_wrong_about_a_shard_is_refused(tmp_path: Path) -> None:
    index = write_shards(tmp_path, 4)
    data = json.loads(index.read_text())
    data["weight_map"]["a"] = shard(tmp_path, 2).name
    data["weight_map"]["ghost"] = shard(tmp_path, 1).name
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError) as caught:
        read_headers(find_weights(tmp_path))
    assert caught.value.details["problems"] == [
        f"{index}: tensor 'a' isn't in {shard(tmp_path, 2).name}",
        f"{index}: tensor 'ghost' isn't in {shard(tmp_path, 1).name}",
    ]


def test_dx_016_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, 4)
    save_file({"b": np.ones(1, np.float32), "a": np.ones(1, np.float32)}, shard(tmp_path, 2))
    with pytest.raises(CheckpointError, match=rf"{shard(tmp_path, 2).name}: tensor 'a' is also in .*00001-of"):
        read_headers(find_weights(tmp_path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{}", "key 'weight_map' must name each tensor's file"),
        ('{"weight_map": {}}', "key 'weight_map'"),
        ('{"weight_map": []}', "key 'weight_map'"),
        ("{", "malformed JSON"),
        ("", "empty (zero bytes)"),
        (POINTER, "git-lfs pointer"),
        ('{"weight_map": {"a": 3}}', r"weight_map['a'] is 3"),
        ('{"weight_map": {"a": "../secret"}}', r"not the name of a file beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', r"not the name of a file beside it"),
        ('{"weight_map": {"a": ".."}}', r"not the name of a file beside it"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, content: str, problem: str) -> None:
    index = tmp_path / f"{STEM}.safetensors.index.json"
    index.write_text(content)
    error = refusal(tmp_path)
    assert error.message.startswith(f"{index}: ")
    assert problem in error.message


@pytest.mark.slow
def test_finding_and_checking_imports_neither_torch_nor_the_hub() -> None:
    program = (
        "import sys\n"
        "from safelight.weights import files, header, hub, match, model_index, reading\n"
        "print(sorted({'torch', 'numpy', 'safetensors', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
