"""The layers that models share: timestep features and rotary positions."""

import math

import pytest
import torch

from safelight.layers.embeddings import timestep_features
from safelight.layers.rope import rotary_table, rotate

# Timestep features


def test_features_are_cosines_then_sines() -> None:
    features = timestep_features(torch.tensor([0.0, 250.0, 999.0]), 8)
    assert features.shape == (3, 8) and features.dtype == torch.float32
    for row, timestep in enumerate((0.0, 250.0, 999.0)):
        angles = [timestep * 10000.0 ** (-i / 4) for i in range(4)]
        expected = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
        assert torch.allclose(features[row], expected, atol=1e-4)


def test_whole_timesteps_are_read_as_numbers() -> None:
    whole, real = torch.tensor([7, 500]), torch.tensor([7.0, 500.0])
    assert torch.equal(timestep_features(whole, 16), timestep_features(real, 16))
    assert not torch.equal(timestep_features(real, 16, max_period=100.0), timestep_features(real, 16))


@pytest.mark.parity
def test_features_are_those_of_diffusers() -> None:
    from diffusers.models.embeddings import get_timestep_embedding

    timesteps = torch.tensor([0.0, 1.0, 333.25, 999.0])
    expected = get_timestep_embedding(timesteps, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    assert torch.allclose(timestep_features(timesteps, 256), expected, atol=1e-6)


# Rotary positions

GRID, AXES = (3, 4, 5), (4, 6, 8)


def test_a_table_has_the_angles_of_its_axes() -> None:
    table = rotary_table(GRID, AXES)
    assert table.shape == (60, 9) and table.dtype == torch.complex64
    grid = table.view(*GRID, 9)
    for t, h, w in ((0, 0, 0), (2, 0, 0), (0, 3, 0), (0, 0, 4), (1, 2, 3)):
        angles = [
            position * 10000.0 ** (-2 * i / dim)
            for position, dim in zip((t, h, w), AXES, strict=True)
            for i in range(dim // 2)
        ]
        expected = torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles])
        assert torch.allclose(grid[t, h, w], expected, atol=1e-6)


def test_a_table_is_the_same_whatever_torchs_default_device() -> None:
    with torch.device("meta"):
        table = rotary_table(GRID, AXES)
    assert table.device.type == "cpu" and torch.equal(table, rotary_table(GRID, AXES))


def test_far_positions_keep_their_precision() -> None:
    """In float32 the angle of position 1023 would already be off by 6e-5."""
    table = rotary_table((1024, 1, 1), (2, 2, 2))
    assert abs(table[1023, 0] - complex(math.cos(1023), math.sin(1023))) < 1e-7


def test_a_device_without_complex_numbers_gets_the_same_rotations() -> None:
    table = rotary_table(GRID, AXES)
    real = rotary_table(GRID, AXES, device=torch.device("meta"))
    assert real.shape == (60, 9, 2) and real.dtype == torch.float32
    x = torch.randn(2, 60, 3, 18, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotate(x, torch.view_as_real(table)), rotate(x, table), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotating_keeps_dtype_shape_and_length(dtype) -> None:
    x = torch.randn(2, 60, 3, 18, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    rotated = rotate(x, rotary_table(GRID, AXES))
    assert rotated.dtype == dtype and rotated.shape == x.shape
    assert torch.equal(x, before)
    assert torch.equal(rotated[:, 0], x[:, 0]), "the first token stays where it is"
    assert not torch.equal(rotated[:, 1], x[:, 1])
    lengths = [tensor.float().unflatten(-1, (-1, 2)).norm(dim=-1) for tensor in (rotated, x)]
    assert torch.allclose(*lengths, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-3)


def test_neighbouring_features_are_rotated_together() -> None:
    table = torch.polar(torch.ones(1, 2), torch.tensor([[math.pi / 2, math.pi]]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    assert torch.allclose(rotate(x, table).flatten(), torch.tensor([-2.0, 1.0, -3.0, -4.0]), atol=1e-6)


def test_scores_depend_on_distance_alone() -> None:
    table = rotary_table((9, 1, 1), (4, 2, 2)).to(torch.complex64)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    q_rows, k_rows = (rotate(x.expand(1, 9, 1, 8), table)[0, :, 0] for x in (q, k))
    scores = q_rows @ k_rows.T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1
