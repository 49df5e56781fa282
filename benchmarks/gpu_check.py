"""Everything a machine with an accelerator is asked, in eight minutes; it runs alike on CUDA, ROCm, XPU and NPU.

    python benchmarks/gpu_check.py --out measured.md [--budget-s 450] [--json measured.json]

Three parts, each a process of its own: every usable backend against the reference (`doctor --verify`), how fast each is
on the shapes of Wan 2.1 (`bench attention`), and the demo's video against the one of sdpa. A part that fails or finds
no time is told as that, and the others go on. The exit status is 1 if one failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SAFELIGHT = (sys.executable, "-m", "safelight")
# Self-attention of Wan 2.1 at 480p: 1.3B with 17 frames, 14B with 81; and the 14B's cross-attention on 512 words.
SHAPES = (
    "tokens=7800,heads=12,head_dim=128",
    "tokens=32760,heads=40,head_dim=128",
    "queries=32760,keys=512,heads=40,head_dim=128",
)
# What compiles at its first call in each form; then what each part may take of the budget at most.
COMPILED = ("flash4", "flex", "flashinfer")
SHARES = {"verify": 0.5, "bench": 0.3, "demo": 0.2}


def run(arguments, timeout_s):
    """A command's JSON and status; the last lines of what it said where there is no JSON."""
    if timeout_s < 5:
        return {"status": None, "document": None, "said": "no time was left"}
    process = subprocess.Popen([*SAFELIGHT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # so that it ends what it has started, too
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return {"status": None, "document": None, "said": f"it took longer than {timeout_s:.0f} s"}
    try:
        document = json.loads(out)
    except json.JSONDecodeError:
        document = None
    return {"status": process.returncode, "document": document, "said": "\n".join(err.splitlines()[-5:])}


def verify(device, timeout_s):
    """Every usable backend against the reference, one command each; those that compile for long come last."""
    deadline_s = time.monotonic() + timeout_s
    doctor = run(("doctor", "--json", *device), timeout_s)
    if doctor["document"] is None:
        return doctor
    usable = [one["backend"] for one in doctor["document"]["backends"] if one["state"] == "usable"]
    found, said = [], []
    for name in sorted(usable, key=lambda name: (name in COMPILED, name)):
        one = run(("doctor", "--verify", "--backend", name, "--json", *device), deadline_s - time.monotonic())
        if one["document"] is None:
            said.append(f"{name}: {one['said']}")
        else:
            found += one["document"]["verified"]
    is_right = not said and all(one["passed"] for one in found)
    return {"status": 0 if is_right else 1, "document": {"verified": found}, "said": "; ".join(said)}


def demo(device, timeout_s):
    """The demo's video by the automatic kernels and by sdpa: the mean difference of pixels, of 255, and both times."""
    import av

    found = {}
    deadline_s = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        clips = {}
        for name in ("auto", "sdpa"):
            path = Path(folder, f"{name}.mp4")
            options = ("--seed", "7", "--out", str(path), "--attention", name, "--json", *device)
            one = run(("generate", "a red circle moving right", *options), deadline_s - time.monotonic())
            found[name] = one
            if one["status"] != 0:
                return {"status": one["status"], "document": None, "said": one["said"]}
            with av.open(str(path)) as video:
                clips[name] = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])
    difference = float(np.abs(clips["auto"].astype(int) - clips["sdpa"].astype(int)).mean())
    document = {
        "mean_difference": difference,
        "plan": [
            f"{row['component']}.{row['role']}: {row['backend']}" for row in found["auto"]["document"]["plan"]["layers"]
        ],
        "timings_s": {name: one["document"]["timings_s"] for name, one in found.items()},
    }
    return {"status": 0 if difference < 2 else 1, "document": document, "said": ""}


def machine_line(facts):
    device = facts["devices"][0] if facts["devices"] else {"name": "no device", "arch": facts["platform"]}
    versions = [f"torch {facts['torch_version']}"]
    versions += [
        f"{name} {facts[key]}" for name, key in (("CUDA", "cuda_version"), ("HIP", "hip_version")) if facts[key]
    ]
    versions += [
        f"{package['dist']} {package['version']}" for package in facts["packages"].values() if package["version"]
    ]
    return f"{device['name']} ({device['arch']}), {', '.join(versions)}"


def verified_rows(document):
    for one in document.get("verified", []):
        dtypes = dict.fromkeys(answer["dtype"] for answer in one["cases"])
        for dtype in dtypes:
            answers = [answer for answer in one["cases"] if answer["dtype"] == dtype]
            failed = [answer["case"] for answer in answers if answer["problem"] is not None]
            errors = [answer["error"] for answer in answers if answer["error"] is not None]
            worst = f"{max(errors):.2g}" if errors else ""
            yield (one["backend"], dtype, str(len(answers)), f"{len(failed)} fail" if failed else "pass", worst)


def timed_rows(document):
    for found in document.get("shapes", []):
        shape = found["shape"]
        words = f"{shape['queries']} on {shape['keys']}, {shape['num_heads']} x {shape['head_dim']}, {shape['dtype']}"
        for timing in found["timings"]:
            share = "" if timing["share_of_peak"] is None else f"{timing['share_of_peak']:.0%}"
            rate = f"{timing['flops_per_s'] / 1e12:.3g}"
            yield (words, timing["backend"], f"{timing['median_s'] * 1e3:.3g}", rate, share)


def table(head, rows):
    rows = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def markdown(facts, parts, took_s):
    """The results as a section of docs/measured.md."""
    lines = [
        f"## {machine_line(facts)}",
        "",
        f"`benchmarks/gpu_check.py`, {time.strftime('%d %B %Y')}, {took_s:.0f} s.",
        "",
    ]
    for name, part in parts.items():
        if part["said"] and part["status"] != 0:
            lines += [f"{name}: {part['said']}", ""]
    if parts["verify"]["document"] is not None:
        head = ("backend", "dtype", "cases", "result", "largest error")
        lines += [table(head, verified_rows(parts["verify"]["document"])), ""]
    if parts["bench"]["document"] is not None:
        head = ("shape", "backend", "ms", "TFLOP/s", "of the matrix peak")
        lines += [table(head, timed_rows(parts["bench"]["document"])), ""]
    if parts["demo"]["document"] is not None:
        found = parts["demo"]["document"]
        differs = f"its pixels differ from sdpa's by {found['mean_difference']:.3f} of 255 on average"
        lines += [f"The demo ran {', '.join(found['plan'])}; {differs}.", ""]
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the section for docs/measured.md")
    parser.add_argument("--json", type=Path, help="everything, as it was found")
    parser.add_argument("--budget-s", type=float, default=450)
    parser.add_argument("--device", help="as for safelight; the best there is by default")
    parser.add_argument("--shape", action="append", help="as for bench attention, instead of Wan's")
    given = parser.parse_args(arguments)
    device = ("--device", given.device) if given.device else ()
    shapes = [word for shape in given.shape or SHAPES for word in ("--shape", shape)]
    started_s = time.monotonic()
    facts = run(("facts", *device), 60)["document"]
    if facts is None:
        sys.exit("safelight facts gave no facts: run it by itself")
    budget_s = given.budget_s - (time.monotonic() - started_s)
    parts = {
        "verify": verify(device, budget_s * SHARES["verify"]),
        "bench": run(("bench", "attention", "--json", *shapes, *device), budget_s * SHARES["bench"]),
        "demo": demo(device, budget_s * SHARES["demo"]),
    }
    took_s = time.monotonic() - started_s
    given.out.write_text(markdown(facts, parts, took_s), encoding="utf-8")
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": facts, "took_s": took_s, "parts": parts}), encoding="utf-8")
    print(given.out.read_text(encoding="utf-8"))
    return 0 if all(part["status"] == 0 for part in parts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
