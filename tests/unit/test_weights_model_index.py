"""model_index.json: the family is what it says, and whatever is wrong with it is named with file and key."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from safelight.errors import CheckpointError
from safelight.planning import DEMO
from safelight.weights.model_index import folder_digest, read_model_index
from safelight.weights.reading import read_json

GOOD: dict[str, Any] = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.35.0",
    "boundary_ratio": 0.875,
    "expand_timesteps": False,
    "layers": [10, 20, 30],
    "image_encoder": [None, None],
    "transformer_2": None,
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def write(folder: Path, data: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return folder


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_model_index(folder)
    assert str(folder / "model_index.json") in caught.value.message
    return caught.value


def test_components_without_the_null_ones_and_the_settings(tmp_path: Path) -> None:
    index = read_model_index(write(tmp_path, GOOD))
    assert index.class_name == "WanPipeline"
    assert dict(index.components) == {
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
        "vae": ("diffusers", "AutoencoderKLWan"),
    }
    assert dict(index.settings) == {
        "boundary_ratio": 0.875,
        "expand_timesteps": False,
        "layers": [10, 20, 30],
        "transformer_2": None,
    }


def test_dx_101_an_unknown_class_and_library_are_kept_as_they_are(tmp_path: Path) -> None:
    index = read_model_index(write(tmp_path, GOOD | {"_class_name": "FooPipeline", "vae": ["custom_lib", "Foo"]}))
    assert index.class_name == "FooPipeline"
    assert index.components["vae"] == ("custom_lib", "Foo")


def test_dx_101_a_missing_component_folder_is_named_with_its_key(tmp_path: Path) -> None:
    index = read_model_index(write(tmp_path, GOOD))
    with pytest.raises(CheckpointError) as caught:
        index.folder("vae")
    assert caught.value.message.startswith(f"{tmp_path / 'vae'}: missing: model_index.json names component 'vae'")
    assert "diffusers.AutoencoderKLWan" in caught.value.message
    assert caught.value.details["key"] == "vae"
    (tmp_path / "vae").mkdir()
    assert index.folder("vae") == tmp_path / "vae"


@pytest.mark.parametrize("name", ["text_encoder", "image_encoder"])
def test_dx_101_a_component_that_the_index_does_not_name(tmp_path: Path, name: str) -> None:
    index = read_model_index(write(tmp_path, GOOD))
    with pytest.raises(CheckpointError, match=rf"no component '{name}'; there are scheduler, vae"):
        index.folder(name)


@pytest.mark.parametrize("value", [None, "", 3, ["WanPipeline"], "absent"])
def test_dx_101_the_class_name_is_required(tmp_path: Path, value: Any) -> None:
    data = {**GOOD, "_class_name": value}
    if value == "absent":
        del data["_class_name"]
    error = refusal(write(tmp_path, data))
    assert "'_class_name' must name the pipeline's class" in error.message
    assert error.details["key"] == "_class_name"


@pytest.mark.parametrize("value", [["diffusers"], ["diffusers", None], ["diffusers", 3], ["", "X"], ["a", "b", "c"]])
def test_dx_101_a_malformed_component_is_named_with_its_key(tmp_path: Path, value: Any) -> None:
    error = refusal(write(tmp_path, GOOD | {"vae": value}))
    assert "'vae' must be [library, class] or [null, null]" in error.message
    assert error.details["key"] == "vae"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty (zero bytes)"),
        (b"{,}", "malformed JSON"),
        (b'{"a": "\xff"}', "malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b"[]", "not an object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "git-lfs pointer"),
    ],
    ids=["empty", "malformed", "not UTF-8", "nested without end", "a list", "git-lfs"],
)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, data: bytes, problem: str) -> None:
    assert problem in refusal(write(tmp_path, data)).message


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert read_model_index(tmp_path).class_name == "WanPipeline"


def test_without_an_index_the_nearby_model_is_named(tmp_path: Path) -> None:
    model = write(tmp_path / "outer" / "wan", GOOD)
    assert f"pass the folder that has one: {model}" in refusal(tmp_path / "outer").message
    (model / "vae").mkdir()
    assert f"this is one component's folder; pass the model's: {model}" in refusal(model / "vae").message
    snapshot = write(tmp_path / "models--a--b" / "snapshots" / "0123", GOOD)
    assert f"pass the folder that has one: {snapshot}" in refusal(tmp_path / "models--a--b").message


def test_without_an_index_and_without_a_model_nearby(tmp_path: Path) -> None:
    folder = tmp_path / "x" / "y"
    assert "can't be listed (No such file or directory)" in refusal(folder).message
    folder.mkdir(parents=True)
    assert "a folder in diffusers' layout" in refusal(folder).message
    (folder / "wan.safetensors").touch()
    assert "wan.safetensors may be a single-file checkpoint" in refusal(folder).message


def test_an_index_that_is_a_broken_symlink(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").symlink_to("../../blobs/abc")
    assert "missing: a symlink to ../../blobs/abc, which isn't there" in refusal(tmp_path).message


def test_read_json_names_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_json(tmp_path / "config.json")
    assert caught.value.message == f"{tmp_path / 'config.json'}: missing"


def test_a_digest_tells_copies_apart_by_everything_but_the_numbers_in_the_weights(tmp_path) -> None:
    def copied(name, change=None):
        folder = Path(shutil.copytree(DEMO, tmp_path / name))
        if change is not None:
            path = folder / change
            path.write_bytes(path.read_bytes() + b" ")
        return folder_digest(folder)

    same = copied("same")
    assert same == folder_digest(DEMO)
    changes = ("model_index.json", "transformer/config.json", "tokenizer/tokenizer.json", "vae/config.json")
    assert len({same, *(copied(str(i), change) for i, change in enumerate(changes))}) == 1 + len(changes)
    weights = next(path.relative_to(DEMO).as_posix() for path in DEMO.rglob("*.safetensors"))
    assert copied("longer", weights) != same
    (tmp_path / "linked").mkdir()
    for path in DEMO.iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    assert folder_digest(tmp_path / "linked") == same
    (tmp_path / "linked" / "notes.json").write_text("{}")
    assert folder_digest(tmp_path / "linked") == same, "what is no part of the model doesn't count"
