"""From what a person calls a model to a folder: paths never touch the network, ids are downloaded in part."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from safelight.errors import CheckpointError
from safelight.weights.hub import resolve_model
from safelight.weights.model_index import read_model_index

INDEX = json.dumps(
    {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.35.0",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
    }
)


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text(INDEX)
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing huggingface_hub raises, so a lookup can't go unseen."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory and the home folder, with a model in several wrappings."""
    make_model(tmp_path / "plain")
    for name in ("my model (v2)", "flux-but-wan", "模型 ünï", "owner/name", "home/models/wan", "a/b/c"):
        make_model(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "plain", target_is_directory=True)
    cache = tmp_path / "hub" / "models--owner--name"
    snapshot = cache / "snapshots" / "0123abc"
    (cache / "blobs").mkdir(parents=True)
    (snapshot / "transformer").mkdir(parents=True)
    for blob, name in (("aa", "model_index.json"), ("bb", "transformer/config.json")):
        shutil.copy(tmp_path / "plain" / name, cache / "blobs" / blob)
        up = "../" * (2 + name.count("/"))
        (snapshot / name).symlink_to(f"{up}blobs/{blob}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


SPELLINGS = {
    "absolute": "{place}/plain",
    "relative": "plain",
    "dot": "./plain",
    "parent": "a/../plain",
    "trailing slash": "plain/",
    "absolute with trailing slash": "{place}/plain/",
    "home": "~/models/wan",
    "spaces and brackets": "my model (v2)",
    "another family's name": "flux-but-wan",
    "not ascii": "模型 ünï",
    "symlink": "link",
    "like a hub id": "owner/name",
    "deep": "a/b/c",
    "hub snapshot": "hub/models--owner--name/snapshots/0123abc",
}


@pytest.mark.usefixtures("_no_hub")
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("kind", [str, Path])
def test_dx_098_every_spelling_of_a_local_path_finds_the_model_without_the_hub(
    place: Path, spelling: str, kind: type
) -> None:
    folder = resolve_model(kind(spelling.format(place=place)))
    assert read_model_index(folder).class_name == "WanPipeline"
    assert read_model_index(folder).folder("transformer").name == "transformer"
    assert json.loads((folder / "transformer" / "config.json").read_text()) == {}


def test_a_path_is_used_as_it_is(place: Path) -> None:
    assert resolve_model("link") == Path("link")
    assert resolve_model("plain/") == Path("plain")
    assert resolve_model("~/models/wan") == place / "home" / "models" / "wan"


ABSENT = [
    "/no/such/model",
    "./wan",
    "../wan",
    "~/wan",
    "~nobody-here/wan",
    "a/b/wan",
    "wan",
    "owner/name-2/",
    "..\\wan\\x",
]
ABSENT += [
    "C:\\models\\wan",
    "模型/wan",
    "https://example.org/owner/name",
    "owner//name-2",
    "own er/name",
    "a\0b",
    "x" * 5000,
]
ABSENT += ["-o/name", "nobody/..", "./owner/name-2"]


@pytest.mark.usefixtures("_no_hub", "place")
@pytest.mark.parametrize("model", ABSENT, ids=lambda model: repr(model[:30]))
def test_dx_098_a_path_that_is_not_there_says_so_and_is_never_looked_up(model: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(model)
    assert "no such folder" in caught.value.message
    assert "not looked up on the hub" in caught.value.message
    assert caught.value.details == {"model": model}


@pytest.mark.usefixtures("_no_hub", "place")
def test_a_path_object_is_never_a_hub_id() -> None:
    with pytest.raises(CheckpointError, match="a Path is never a hub id"):
        resolve_model(Path("owner/name-2"))


@pytest.mark.usefixtures("_no_hub", "place")
@pytest.mark.parametrize("model", ["", "  "])
def test_an_empty_name_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match="empty"):
        resolve_model(model)


@pytest.mark.usefixtures("_no_hub", "place")
@pytest.mark.parametrize(
    ("model", "remedy"),
    [("plain/model_index.json", "pass its folder, plain"), ("plain/transformer/config.json", "a model is a folder")],
)
def test_a_file_is_refused_with_the_folder_to_pass(model: str, remedy: str) -> None:
    with pytest.raises(CheckpointError, match=f"is a file; {remedy}"):
        resolve_model(model)


@pytest.mark.usefixtures("_no_hub")
def test_a_path_that_can_not_be_followed_is_no_hub_id(place: Path) -> None:
    (place / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="not looked up on the hub"):
        resolve_model("loop/name")


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, a gated one and nothing else; it notes what was asked of it."""

    files: dict[str, bytes] = {}  # noqa: RUF012 - set once below
    commit = "c" * 40
    asked: list[str]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        self.server.asked.append(path)  # type: ignore[attr-defined]
        if path.startswith("/api/models/gated/model"):
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif path.startswith("/api/models/down/model"):
            self.answer(500, b"{}")
        elif path.endswith("/revision/nowhere"):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev"})
        elif path in ("/api/models/owner/bare", "/api/models/owner/bare/revision/main"):
            self.answer(200, json.dumps({"id": "owner/bare", "sha": "b" * 40, "siblings": []}).encode())
        elif path == f"/api/models/owner/bare/tree/{'b' * 40}":
            self.answer(200, b"[]")
        elif path in ("/api/models/owner/video", "/api/models/owner/video/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer(200, json.dumps({"id": "owner/video", "sha": self.commit, "siblings": siblings}).encode())
        elif path == f"/api/models/owner/video/tree/{self.commit}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{number:040x}"}
                for number, (name, data) in enumerate(self.files.items())
            ]
            self.answer(200, json.dumps(tree).encode())
        elif path.startswith(f"/owner/video/resolve/{self.commit}/"):
            name = path.split(self.commit + "/", 1)[1]
            number = list(self.files).index(name)
            self.answer(200, self.files[name], {"ETag": f'"{number:040x}"', "X-Repo-Commit": self.commit})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


NEEDED = {
    "model_index.json": INDEX.encode(),
    "scheduler/scheduler_config.json": b"{}",
    "tokenizer/spiece.model": b"pieces",
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/merges.txt": b"",
    "transformer/config.json": b"{}",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": b"one",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors": b"two",
    "transformer/diffusion_pytorch_model.safetensors.index.json": b"{}",
}
NOT_NEEDED = {
    "README.md": b"",
    "original-checkpoint.safetensors": b"tens of gigabytes",
    "assets/example.json": b"",
    "transformer/diffusion_pytorch_model.bin": b"pickle",
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"variant",
    "transformer_2/diffusion_pytorch_model.safetensors": b"a component that the index has as null",
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A running hub: its address, and the list of paths it was asked for."""
    handler = type("Handler", (Hub,), {"files": NEEDED | NOT_NEEDED})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield {"address": f"http://127.0.0.1:{server.server_port}", "asked": server.asked}  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import json, sys
from safelight.errors import CheckpointError
from safelight.weights.hub import resolve_model
try:
    found = {"path": str(resolve_model(sys.argv[1], **json.loads(sys.argv[2])))}
except CheckpointError as error:
    found = error.to_json()
print(json.dumps(found | {"torch": "torch" in sys.modules}))
"""


def ask(
    model: str,
    endpoint: str,
    home: Path,
    environment: dict[str, str] | None = None,
    *,
    program: str = PROGRAM,
    **options: Any,
) -> dict[str, Any]:
    """Resolve a model in a process of its own, since huggingface_hub reads its settings when it is imported."""
    settings = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, model, json.dumps(options)],
        env={**os.environ, **settings, "HF_HUB_DISABLE_TELEMETRY": "1", **(environment or {})},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert not answer.pop("torch")
    return answer


@pytest.mark.slow
def test_a_hub_id_downloads_what_its_components_need_and_then_works_offline(
    hub: dict[str, Any], tmp_path: Path
) -> None:
    answer = ask("owner/video", hub["address"], tmp_path)
    folder = Path(answer["path"])
    there = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert there == NEEDED
    asked = len(hub["asked"])
    assert ask("owner/video", hub["address"], tmp_path, offline=True) == answer
    assert ask("owner/video", hub["address"], tmp_path, {"HF_HUB_OFFLINE": "1"}) == answer
    assert len(hub["asked"]) == asked


@pytest.mark.slow
def test_a_variant_is_downloaded_instead_of_the_plain_weights(hub: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(ask("owner/video", hub["address"], tmp_path, variant="fp16")["path"])
    assert [path.name for path in folder.rglob("*.safetensors")] == ["diffusion_pytorch_model.fp16.safetensors"]


PLANNING = """
import json, sys
from safelight.errors import CheckpointError
from safelight.planning import layers_of
try:
    layers_of(sys.argv[1])("float32")
except CheckpointError:
    pass  # the hub's files here are no model's
print(json.dumps({"torch": "torch" in sys.modules}))
"""


@pytest.mark.slow
def test_planning_downloads_no_weights(hub: dict[str, Any], tmp_path: Path) -> None:
    ask("owner/video", hub["address"], tmp_path, program=PLANNING)
    assert any(path.endswith("model_index.json") for path in hub["asked"])
    assert [path for path in hub["asked"] if "safetensors" in path] == []


REFUSALS = [
    ("nobody/nothing", {}, "not found on the hub"),
    ("gated/model", {}, "gated: accept its terms"),
    ("owner/video", {"revision": "nowhere"}, "has no revision 'nowhere'"),
    ("owner/video", {"offline": True}, "the hub is switched off"),
    ("owner/re..po", {}, "the download failed"),
    ("down/model", {}, "the hub can't be reached"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options", "why"), REFUSALS, ids=lambda value: str(value)[:30])
def test_a_hub_id_that_can_not_be_had_is_one_clear_refusal(
    hub: dict[str, Any], tmp_path: Path, model: str, options: dict[str, Any], why: str
) -> None:
    answer = ask(model, hub["address"], tmp_path, **options)
    assert answer["error"] == "CheckpointError"
    assert why in answer["message"]
    assert f"no folder of that name in {tmp_path}" in answer["message"]
    assert f"hf download {model}" in answer["message"]
    assert "\n" not in answer["message"]


@pytest.mark.slow
def test_a_hub_model_in_another_layout_is_refused(hub: dict[str, Any], tmp_path: Path) -> None:
    answer = ask("owner/bare", hub["address"], tmp_path)
    assert answer["error"] == "CheckpointError"
    assert "'owner/bare': the hub's model has no model_index.json" in answer["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "environment", "why"),
    [
        ("http://127.0.0.1:9", {}, "the hub can't be reached"),
        ("http://127.0.0.1:9", {"HF_HUB_OFFLINE": "1"}, "the hub is switched off"),
    ],
    ids=["unreachable", "HF_HUB_OFFLINE"],
)
def test_without_a_network_the_message_says_so(
    tmp_path: Path, endpoint: str, environment: dict[str, str], why: str
) -> None:
    answer = ask("owner/video", endpoint, tmp_path, environment)
    assert answer["error"] == "CheckpointError"
    assert why in answer["message"]
    assert "Cause: " in answer["message"]
    assert "\n" not in answer["message"]
