"""Safelight against diffusers: the same checkpoint, seeds, steps and threads, in one run.

Three cases:

demo   denoising with the demo checkpoint at its own size
large  denoising with random weights: hidden size 768, 6 layers, 4,096 tokens; also as a share of the machine's own
       matrix-multiply rate
cold   the whole process, from the command line to the video file, with the demo checkpoint

Both sides run by turns (A B A B ...), so that what else the machine does meets both; the medians and their ratio are
printed. Before anything is timed the outputs are compared, and a difference above the tolerance ends the run.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safelight.attention.plan import build_plan
from safelight.attention.runtime import bind, load_plan
from safelight.attention.select import declared_backends
from safelight.media import X264_OPTIONS
from safelight.models.wan_config import WanConfig
from safelight.pipelines.wan.pipeline import WanPipeline
from safelight.planning import DEMO, check_model
from safelight.platforms import probe_machine
from safelight.request import Request

PROMPT = "a red circle moving right"
SEED = 7
TOLERANCE = 1e-4  # of the largest latent
TEXT_LENGTH = 512

# What each case must reach: our time over diffusers' at most.
TARGETS = {"demo": 0.6, "large": 0.95, "cold": 0.7}

LARGE = {"num_attention_heads": 12, "attention_head_dim": 64, "ffn_dim": 3072, "num_layers": 6}
LARGE_SIZE = {"width": 512, "height": 512, "num_frames": 13}

# The same job as `safelight generate PROMPT --seed SEED --out FILE`, with nothing that it doesn't need.
DIFFUSERS_PROGRAM = """
import sys
import av, torch
from diffusers import WanPipeline

model, prompt, seed, path = sys.argv[1:5]
pipe = WanPipeline.from_pretrained(model)
frames = pipe(
    prompt, height=64, width=64, num_frames=9, num_inference_steps=20, guidance_scale=3.0,
    generator=torch.Generator().manual_seed(int(seed)),
).frames[0]
with av.open(path, "w") as container:
    stream = container.add_stream("libx264", rate=8, options=dict(pair.split("=") for pair in sys.argv[5:]))
    stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
    for frame in (frames * 255).round().astype("uint8"):
        container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
    container.mux(stream.encode())
"""


@dataclass(kw_only=True)
class Case:
    """One comparison: seconds of each run, the largest difference of the outputs, and what else was measured."""

    name: str
    what: str
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    difference: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Our median time over theirs."""
        return statistics.median(self.ours_s) / statistics.median(self.theirs_s)

    @property
    def is_met(self) -> bool:
        return self.ratio <= TARGETS[self.name]

    def to_json(self) -> dict[str, Any]:
        medians = {"ours_median_s": statistics.median(self.ours_s), "theirs_median_s": statistics.median(self.theirs_s)}
        return {**asdict(self), **medians, "ratio": self.ratio, "target": TARGETS[self.name], "is_met": self.is_met}


def alternate(case: Case, repeats: int, ours: Callable[[], object], theirs: Callable[[], object]) -> Iterator[int]:
    """Time both by turns, and yield after each turn."""
    for turn in range(repeats):
        for work, times in ((ours, case.ours_s), (theirs, case.theirs_s)):
            started_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - started_s)
        yield turn


class Ours:
    """Safelight's pipeline, the text already encoded."""

    def __init__(self, model: Path, request: Request) -> None:
        checkpoint = check_model(model)
        pipeline = checkpoint.load("float32", "cpu", lambda step, num_steps: None)
        assert isinstance(pipeline, WanPipeline)
        backends = declared_backends()
        groups = checkpoint.layer_groups("float32")
        loaded = load_plan(lambda machine: build_plan(groups, machine, [], backends), probe_machine("cpu"), backends)
        for component, module in pipeline.modules.items():
            bind(component, module, loaded)
        self.pipeline = pipeline
        self.request = checkpoint.resolve(request)
        with torch.inference_mode():
            self.text, _ = pipeline.encode(self.request)

    @torch.inference_mode()
    def denoise(self) -> list[Tensor]:
        """The latents after each step."""
        states = self.pipeline.denoise(self.request, self.text, [SEED])
        return [state.latents for state in states][1:]


class Theirs:
    """diffusers' pipeline, the text already encoded."""

    def __init__(self, model: Path, request: Request) -> None:
        from diffusers import WanPipeline as Reference

        self.pipeline = Reference.from_pretrained(model)
        self.pipeline.set_progress_bar_config(disable=True)
        self.request = request
        with torch.inference_mode():
            self.text = self.pipeline.encode_prompt(
                request.prompt, request.negative_prompt, max_sequence_length=TEXT_LENGTH
            )

    def denoise(self) -> list[Tensor]:
        """The latents after each step."""
        latents: list[Tensor] = []

        def keep(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            latents.append(tensors["latents"])
            return tensors

        self.pipeline(
            prompt_embeds=self.text[0],
            negative_prompt_embeds=self.text[1],
            height=self.request.height,
            width=self.request.width,
            num_frames=self.request.num_frames,
            num_inference_steps=self.request.num_steps,
            guidance_scale=self.request.guidance_scale,
            generator=torch.Generator().manual_seed(SEED),
            output_type="latent",
            callback_on_step_end=keep,
        )
        return latents


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of any step's latents, in units of the largest latent; AssertionError above TOLERANCE."""
    found = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    assert found <= TOLERANCE, f"the latents differ by {found:.1e} of their scale; at most {TOLERANCE} is allowed"
    return found


def compare_denoising(name: str, model: Path, request: Request, repeats: int) -> Case:
    """Time the denoising of one checkpoint with both."""
    ours = Ours(model, request)
    theirs = Theirs(model, ours.request)
    tokens, rows = num_tokens(ours), 2
    num_steps = ours.request.num_steps
    assert num_steps is not None
    case = Case(name=name, what=f"denoising, {num_steps} steps, {rows} x {tokens} tokens")
    case.difference = largest_difference(ours.denoise(), theirs.denoise())
    rates = [multiply_rate()]
    for _ in alternate(case, repeats, ours.denoise, theirs.denoise):
        rates.append(multiply_rate())
    rate = statistics.median(rates)
    config = ours.pipeline.checkpoint.transformer
    text_keys = max(ours.text.num_tokens) + 1
    work = num_steps * rows * forward_flops(config, tokens, text_keys)
    # diffusers projects all text rows in every pass; ours are projected once per request, which is next to nothing.
    their_work = num_steps * rows * forward_flops(config, tokens, TEXT_LENGTH, projects_text=True)
    case.extra = {
        "multiply_gflops": rate / 1e9,
        "ours_share": work / statistics.median(case.ours_s) / rate,
        "theirs_share": their_work / statistics.median(case.theirs_s) / rate,
    }
    return case


def num_tokens(ours: Ours) -> int:
    """Video tokens of the request."""
    noise = ours.denoise()[0]
    t, h, w = ours.pipeline.transformer.grid(noise)
    return t * h * w


def forward_flops(config: WanConfig, tokens: int, text_keys: int, *, projects_text: bool = False) -> float:
    """Floating-point operations of the matrix products of one row's forward pass; a multiply-add is two."""
    dim = config.dim
    per_token = 4 * dim * dim  # self-attention's q, k, v and output
    per_token += 2 * dim * dim  # cross-attention's q and output
    per_token += 2 * dim * config.ffn_dim
    per_token += 2 * dim * (tokens + text_keys)  # scores and weighted sums
    block = tokens * per_token
    if projects_text:
        block += text_keys * 2 * dim * dim
    patch = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
    ends = tokens * dim * patch * (config.in_channels + config.out_channels)
    if projects_text:
        ends += text_keys * dim * (config.text_dim + dim)
    return 2.0 * (config.num_layers * block + ends)


def multiply_rate(size: int = 2048) -> float:
    """Floating-point operations per second of a product of two square float32 matrices, the best of three."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    best_s = float("inf")
    for _ in range(3):
        started_s = time.perf_counter()
        a @ b
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2.0 * size**3 / best_s


def write_large(folder: Path) -> Path:
    """The demo with a larger transformer of random weights."""
    from diffusers import WanTransformer3DModel

    shutil.copytree(DEMO, folder)
    config = json.loads((DEMO / "transformer" / "config.json").read_text())
    kept = {key: value for key, value in config.items() if not key.startswith("_")}
    shutil.rmtree(folder / "transformer")
    torch.manual_seed(SEED)
    WanTransformer3DModel(**{**kept, **LARGE}).save_pretrained(folder / "transformer")
    return folder


def compare_cold_starts(folder: Path, repeats: int, threads: int) -> Case:
    """Time whole processes, from the command line to the video file."""
    case = Case(name="cold", what="the whole process, prompt to video file, demo checkpoint")
    program = folder / "generate.py"
    program.write_text(DIFFUSERS_PROGRAM)
    files = {"ours": folder / "ours.mp4", "theirs": folder / "theirs.mp4"}
    safelight = Path(sys.executable).with_name("safelight")
    encoder = [f"{name}={value}" for name, value in X264_OPTIONS.items()]
    commands = {
        "ours": [str(safelight), "generate", PROMPT, "--seed", str(SEED), "--out", str(files["ours"])],
        "theirs": [sys.executable, str(program), str(DEMO), PROMPT, str(SEED), str(files["theirs"]), *encoder],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def run(side: str) -> None:
        files[side].unlink(missing_ok=True)
        done = subprocess.run(commands[side], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{side} failed: {done.stderr}"

    run("ours")
    run("theirs")
    frames: dict[str, NDArray[np.uint8]] = {side: read_frames(path) for side, path in files.items()}
    difference = np.abs(frames["ours"].astype(int) - frames["theirs"].astype(int))
    # The colours were converted in two ways, and then compressed.
    case.difference = float(difference.mean())
    assert case.difference <= 2, f"the videos differ by {case.difference:.2f} of 255 on average; at most 2 is allowed"
    for _ in alternate(case, repeats, lambda: run("ours"), lambda: run("theirs")):
        pass
    return case


def read_frames(path: Path) -> NDArray[np.uint8]:
    """A video's frames [frames, height, width, 3]."""
    import av

    with av.open(path) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    (device, *_) = probe_machine("cpu").devices
    packages = ("torch", "diffusers", "transformers", "safelight")
    return {
        "cpu": device.name,
        "arch": device.arch,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def table(cases: list[Case]) -> str:
    """The cases for people."""
    lines = [f"{'case':<7}{'Safelight':>11}{'diffusers':>11}{'ratio':>8}{'target':>8}  "]
    for case in cases:
        ours, theirs = statistics.median(case.ours_s), statistics.median(case.theirs_s)
        verdict = "met" if case.is_met else "MISSED"
        lines.append(
            f"{case.name:<7}{ours:>9.3f} s{theirs:>9.3f} s{case.ratio:>8.3f}{TARGETS[case.name]:>8.2f}  {verdict}"
        )
    for case in cases:
        spread = ", ".join(
            f"{side} {min(times):.3f} to {max(times):.3f} s"
            for side, times in (("Safelight", case.ours_s), ("diffusers", case.theirs_s))
        )
        lines += ["", f"{case.name}: {case.what}; {len(case.ours_s)} runs each: {spread}"]
        unit = "of 255 on average" if case.name == "cold" else "of the latents' scale at most"
        lines.append(f"  the outputs differ by {case.difference:.1e} {unit}")
        if case.extra:
            lines.append(
                f"  matrix products here run at {case.extra['multiply_gflops']:.0f} GFLOP/s; of that Safelight reaches "
                f"{case.extra['ours_share']:.0%}, diffusers {case.extra['theirs_share']:.0%}"
            )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each side (default: 7)")
    parser.add_argument("--steps", type=int, help="denoising steps (default: demo 20, large 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (default: its own)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with status 1 where a target is missed")
    given = parser.parse_args()
    for name in ("repeats", "steps", "threads"):
        value = getattr(given, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    return given


def main() -> int:
    given = arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when diffusers is imported: nothing here comes from elsewhere
    torch.set_num_threads(given.threads)
    chosen = given.case or list(TARGETS)
    cases = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # First, while this process holds little memory.
        if "cold" in chosen:
            cases.append(compare_cold_starts(folder, given.repeats, given.threads))
        if "demo" in chosen:
            request = Request(prompt=PROMPT, num_steps=given.steps or 20)
            cases.append(compare_denoising("demo", DEMO, request, given.repeats))
        if "large" in chosen:
            request = Request(prompt=PROMPT, num_steps=given.steps or 3, **LARGE_SIZE)
            cases.append(compare_denoising("large", write_large(folder / "large"), request, given.repeats))
    if given.json:
        print(json.dumps({"machine": machine(), "cases": [case.to_json() for case in cases]}, indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine().items()), end="\n\n")
        print(table(cases))
    return 1 if given.check and not all(case.is_met for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
