"""The engine over several ranks: the same latents and file on every grid, and ranks that agree before they start."""

import dataclasses
import math

import pytest
import torch

from safelight import CancelToken, Engine, Request
from safelight.attention.grid import Grid
from safelight.attention.volume import step_volumes
from safelight.errors import Cancelled, RequestError
from safelight.media import save_result
from safelight.planning import check_model
from tests.parallel.gloo import mesh, on_processes

# 3 latent frames of 5 x 3 tokens: neither 2 ranks nor 4 share them evenly.
REQUEST = {"width": 80, "height": 48, "num_frames": 9, "num_steps": 3, "seed": 11, "num_outputs": 2}
PROMPT = "a red circle moving right"
# Ulysses, ring and guidance branches.
GRIDS = {
    "1 rank": (1, 1, 1),
    "ulysses 2": (2, 1, 1),
    "ring 2": (1, 2, 1),
    "cfg 2": (1, 1, 2),
    "ulysses 2 x ring 2": (2, 2, 1),
    "ring 4": (1, 4, 1),
    "ulysses 2 x cfg 2": (2, 1, 2),
    "ring 2 x cfg 2": (1, 2, 2),
}


class CountingLink:
    """A link that counts the bytes that it is given for other ranks."""

    def __init__(self, link):
        self.link, self.rank, self.size = link, link.rank, link.size
        self.sent_bytes = 0

    def exchange(self, send, send_lengths, receive_lengths):
        self.sent_bytes += sum(part.nbytes for i, part in enumerate(send.split(send_lengths)) if i != self.rank)
        return self.link.exchange(send, send_lengths, receive_lengths)

    def pass_on(self, send, receive):
        self.sent_bytes += send.nbytes
        return self.link.pass_on(send, receive)

    def gather(self, x, lengths, dim=1):
        longest = x.narrow(dim, 0, 1).nbytes * max(lengths)  # every rank's slice is padded to it
        self.sent_bytes += (self.size - 1) * longest
        return self.link.gather(x, lengths, dim)


def counting(mesh):
    """A mesh whose links count, but for the one that agreements go over."""
    names = ("sequence", "ulysses", "ring", "branches")
    return dataclasses.replace(mesh, **{name: CountingLink(getattr(mesh, name)) for name in names})


def sent_bytes(mesh):
    return sum(getattr(mesh, name).sent_bytes for name in ("sequence", "ulysses", "ring", "branches"))


def generated(rank, grid, folder, **options):
    """The latents, the frames, the files and the plan on a rank."""
    here = None if grid == (1, 1, 1) else counting(mesh(*grid))
    engine = Engine.from_pretrained(device="cpu", mesh=here, **options)
    result = engine.generate(PROMPT, **REQUEST)
    pipeline, request = engine._pipeline, result.request
    text, _ = pipeline.encode(request)
    before = 0 if here is None else sent_bytes(here)
    *_, state = pipeline.denoise(request, text, [request.seed, request.seed + 1])
    if result.outputs:
        result = save_result(result, folder / f"{'-'.join(map(str, grid))}.mp4")
    return {
        "latents": state.latents,
        "sent": 0 if here is None else sent_bytes(here) - before,
        "frames": [torch.from_numpy(output.pixels) for output in result.outputs],
        "files": [output.path.name for output in result.outputs],
        "checks": [str(check) for check in result.attention_checks],
        "plan": result.to_json()["plan"],
    }


def all_generated(rank, grids, folder):
    """What this rank gets on each of the grids of its size, and once more with checked kernels on the last of them."""
    found = {name: generated(rank, grid, folder) for name, grid in grids.items()}
    checked = folder / "checked"
    checked.mkdir(exist_ok=True)
    return {**found, "checked": generated(rank, [*grids.values()][-1], checked, check_attention="always")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank gets, by the grid's name, with the folder that its files went to."""
    found = {}
    for size in (1, 2, 4):
        grids = {name: grid for name, grid in GRIDS.items() if math.prod(grid) == size}
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        files = folder / "files"
        files.mkdir()
        of_ranks = on_processes(size, all_generated, folder, grids, files)
        found |= {name: ([one[name] for one in of_ranks], files) for name in of_ranks[0]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRIDS if name != "1 rank"])
def test_dx_094_the_grid_does_not_change_the_picture(name, ranks) -> None:
    (alone,), _ = ranks["1 rank"]
    everywhere, files = ranks[name]
    size = alone["latents"].abs().amax()
    for found in everywhere:
        assert (found["latents"] - alone["latents"]).abs().amax() < 1e-4 * size
    assert all(torch.equal(found["latents"], everywhere[0]["latents"]) for found in everywhere), "all have all latents"
    first, *others = everywhere
    for frames, same in zip(first["frames"], alone["frames"], strict=True):
        assert (frames.int() - same.int()).abs().amax() <= 1  # a rounding to the next of 256
    written = sorted(files.glob(f"{'-'.join(map(str, GRIDS[name]))}*"))
    assert [path.name for path in written] == sorted(first["files"]) and len(written) == REQUEST["num_outputs"]
    assert all(found["frames"] == [] for found in others), "the first rank alone decodes"
    ulysses, ring, cfg = GRIDS[name]
    assert all(found["plan"]["grid"] == {"ulysses": ulysses, "ring": ring, "cfg": cfg} for found in everywhere)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRIDS if name != "1 rank"])
def test_a_step_sends_the_bytes_that_explain_says(name, ranks) -> None:
    everywhere, _ = ranks[name]
    grid = Grid(**everywhere[0]["plan"]["grid"])
    checkpoint = check_model(None)
    sequences = checkpoint.sequences(checkpoint.resolve(Request(prompt="any", **REQUEST)))
    # Both outputs in one batch.
    both = {name: dataclasses.replace(one, rows=2 * one.rows) for name, one in sequences.items()}
    (step,) = step_volumes(checkpoint.layer_groups("float32"), grid, both)
    assert max(found["sent"] for found in everywhere) == REQUEST["num_steps"] * step.total_bytes > 0


@pytest.mark.slow
def test_kernels_on_a_grid_are_held_to_the_reference_too(ranks) -> None:
    everywhere, _ = ranks["checked"]
    for found in everywhere:
        assert {check.partition(":")[0] for check in found["checks"]} >= {"transformer.self", "transformer.cross"}


def disagreements(rank):
    """What each rank is told where it was given something of its own."""
    found = {}
    here = mesh(2, 1)

    def told(name, function):
        try:
            function()
            found[name] = None
        except (Cancelled, RequestError) as error:
            found[name] = f"{type(error).__name__}: {error.message}"

    engine = Engine.from_pretrained(device="cpu", mesh=here)
    small = {"width": 64, "height": 64, "num_frames": 1, "num_steps": 1}
    told("prompt", lambda: engine.generate(["a red circle", "a blue circle"][rank], **small))
    told("seed", lambda: engine.generate("a red circle", seed=rank, **small))
    told("steps", lambda: engine.generate("a red circle", **{**small, "num_steps": 1 + rank}))
    told("plan", lambda: engine.generate("a red circle", attention={"": ["sdpa", "auto"][rank]}, **small))
    told("dtype", lambda: Engine.from_pretrained(device="cpu", dtype=["float32", "bfloat16"][rank], mesh=here))
    told("guidance", lambda: Engine.from_pretrained(device="cpu", mesh=mesh(1, 1, 2)).generate("a", guidance_scale=1))
    told("world", lambda: mesh(2, 2))
    # One rank refuses what another doesn't, all refuse the same, one is told to stop: nobody waits for anybody.
    told("width", lambda: engine.generate("a red circle", **{**small, "width": 64 + rank}))
    told("widths", lambda: engine.generate("a red circle", **{**small, "width": 65}))
    told("kernel", lambda: engine.generate("a red circle", attention={"": ["sdpa", "flash3"][rank]}, **small))
    told("model", lambda: Engine.from_pretrained([None, "/nowhere"][rank], device="cpu", mesh=here))
    token = CancelToken()
    if rank == 1:
        token.cancel()
    told("cancel", lambda: engine.generate("a red circle", cancel=token, **small))
    seeds = [
        engine.generate("a red circle", **small).request.seed,
        engine.generate("a red circle", seed=None if rank else 5, **small).request.seed,
    ]
    return found, seeds


@pytest.mark.slow
def test_ranks_agree_before_they_start(tmp_path) -> None:
    (first, seeds), (second, other_seeds) = on_processes(2, disagreements, tmp_path)
    assert first == second, "every rank is told the same"
    assert first["prompt"].startswith(
        "AgreementError: the ranks don't agree: prompt is 'a blue circle' on rank 1 and 'a red circle' on rank 0;"
    )
    assert "seed is 1 on rank 1 and 0 on rank 0" in first["seed"]
    assert "num_steps is 2 on rank 1 and 1 on rank 0" in first["steps"]
    assert "attention is" in first["plan"]
    assert "dtype is 'bfloat16' on rank 1 and 'float32' on rank 0" in first["dtype"]
    assert (
        "transformer runs one guidance branch (a guidance scale above 1 makes two), which cfg_parallel 2 doesn't split"
        in first["guidance"]
    )
    assert "a grid of 4 ranks (cfg_parallel x ring x ulysses), 2 were started" in first["world"]
    assert first["width"].startswith("AgreementError: the ranks don't agree: width is 65 on rank 1 and 64 on rank 0")
    assert first["widths"].startswith("RequestError: width is 65; this model needs a multiple of 16")
    assert "AgreementError" in first["kernel"] and "attention is {'': 'flash3'} on rank 1" in first["kernel"]
    assert "AgreementError: the ranks don't agree: error is \"model '/nowhere': no such" in first["model"]
    assert "on rank 1 and none on rank 0" in first["model"]
    assert first["cancel"] == "Cancelled: the request was cancelled"
    assert seeds == other_seeds and seeds[1] == 5, "what has no seed takes the first rank's"
