"""The benchmark program: what it counts, what it prints, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.against_diffusers import TARGETS, Case, forward_flops, largest_difference, table
from safelight.attention.layer import Attention
from safelight.attention.reference import reference_attention
from safelight.models.wan import WanTransformer
from safelight.models.wan_config import WanConfig
from tests.wan_reference import TINY

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "against_diffusers.py"


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return reference_attention(q, k, v)[0]


@pytest.mark.parametrize("changes", [{}, {"num_layers": 3, "ffn_dim": 7, "out_channels": 2, "patch_size": [1, 1, 2]}])
def test_the_operations_of_a_pass_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    model = WanTransformer(WanConfig.from_json(TINY | changes))
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.kernel = by_definition
    latents = torch.randn(2, model.config.in_channels, 3, 4, 6)
    grid = model.grid(latents)
    text = model.text_context(torch.randn(2, 11, model.config.text_dim), [11, 11], 11)
    (modulation,) = model.modulations(torch.tensor([500.0]))

    with FlopCounterMode(display=False) as counted:
        model(latents, modulation, text, model.rotary(grid))

    assert counted.get_total_flops() == 2 * forward_flops(model.config, grid[0] * grid[1] * grid[2], 11)


def test_the_ratio_is_that_of_the_medians() -> None:
    case = Case(name="demo", what="x", ours_s=[1.0, 9.0, 2.0], theirs_s=[4.0, 5.0, 0.1])

    assert case.ratio == 0.5 and case.is_met
    assert case.to_json()["ratio"] == 0.5 and json.dumps(case.to_json())
    missed = Case(name="cold", what="x", ours_s=[3.0], theirs_s=[4.0])
    assert not missed.is_met
    assert [line.split()[-1] for line in table([case, missed]).splitlines()[1:3]] == ["met", "MISSED"]


def test_outputs_that_differ_end_the_run() -> None:
    latents = [torch.tensor([1.0, -2.0])]

    assert largest_difference(latents, [torch.tensor([1.0001, -2.0])]) == pytest.approx(5e-5, rel=1e-2)
    with pytest.raises(AssertionError, match="differ by"):
        largest_difference(latents, [torch.tensor([1.01, -2.0])])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, list(TARGETS)),
        (["--repeats", "0"], 2, ["--repeats is 0"]),
        (["--case", "huge"], 2, ["demo", "large", "cold"]),
    ],
)
def test_the_program_says_what_it_takes(arguments: list[str], status: int, said: list[str]) -> None:
    ran = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True)

    assert ran.returncode == status
    assert [text for text in said if text not in ran.stdout + ran.stderr] == []
