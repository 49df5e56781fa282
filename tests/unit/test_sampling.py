"""Sampling: schedules and solvers against diffusers, noise from seeds, guidance, and the loop itself."""

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safelight.errors import Cancelled, CheckpointError
from safelight.request import CancelToken
from safelight.sampling.denoise import denoise
from safelight.sampling.flow import Euler, LibrarySolver, shifted_sigmas, solver_from_config
from safelight.sampling.guidance import branches, guide
from safelight.sampling.noise import draw_noise, output_seeds
from safelight.sampling.schedulers import SCHEDULERS, check_scheduler

EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.35.0", "shift": 3.0}
UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "num_train_timesteps": 1000,
    "solver_order": 2,
}
STEPS = (1, 2, 4, 8, 20, 50)
SHIFTS = (1.0, 3.0, 5.0, 0.5)


# Schedules and solvers


def library_scheduler(class_name, num_steps, **config):
    import diffusers

    scheduler = getattr(diffusers, class_name)(**config)
    scheduler.set_timesteps(num_steps)
    return scheduler


def library_euler(num_steps, shift, num_train_timesteps=1000):
    return library_scheduler(
        "FlowMatchEulerDiscreteScheduler", num_steps, shift=shift, num_train_timesteps=num_train_timesteps
    )


def bent(latents, i):
    """A velocity that depends on latents and step, as a model's does."""
    return torch.sin(3 * latents + i) + 0.3 * latents


@pytest.mark.parity
@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("num_train_timesteps", [1000, 500])
def test_noise_levels_are_those_of_diffusers(num_steps, shift, num_train_timesteps) -> None:
    theirs = library_euler(num_steps, shift, num_train_timesteps)
    sigmas = shifted_sigmas(num_steps, shift, num_train_timesteps)
    assert sigmas.dtype == torch.float32 and sigmas.shape == (num_steps + 1,)
    assert (sigmas - theirs.sigmas).abs().max() <= 1e-6
    timesteps = Euler(sigmas, num_train_timesteps).timesteps
    assert timesteps.shape == (num_steps,)
    assert (timesteps - theirs.timesteps).abs().max() <= 1e-6 * num_train_timesteps


@pytest.mark.parity
@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("shift", SHIFTS)
def test_steps_are_those_of_diffusers(num_steps, shift) -> None:
    theirs, ours = library_euler(num_steps, shift), Euler(shifted_sigmas(num_steps, shift))
    noise = draw_noise([7], (3, 5, 7))
    expected = noise
    for i, timestep in enumerate(theirs.timesteps):
        expected = theirs.step(bent(expected, i), timestep, expected, return_dict=False)[0]
    *_, last = denoise(bent, noise, ours)
    assert (last.latents - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parity
@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_unipc_is_the_librarys_own(num_steps, order) -> None:
    config = {**UNIPC, "solver_order": order}
    theirs = library_scheduler(num_steps=num_steps, **{("class_name" if k[0] == "_" else k): config[k] for k in config})
    noise = draw_noise([7], (3, 5, 7))
    expected = noise
    for i, timestep in enumerate(theirs.timesteps):
        expected = theirs.step(bent(expected, i), timestep, expected, return_dict=False)[0]
    ours = solver_from_config(config, num_steps)
    assert isinstance(ours, LibrarySolver)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    *_, last = denoise(bent, noise, ours)
    assert torch.equal(last.latents, expected)


def test_noise_levels_fall_from_one_to_zero() -> None:
    for num_steps in STEPS:
        for shift in SHIFTS:
            sigmas = shifted_sigmas(num_steps, shift)
            assert sigmas[0] == 1 and sigmas[-1] == 0
            assert (sigmas.diff() < 0).all()


def test_a_larger_shift_stays_longer_with_the_noise() -> None:
    assert (shifted_sigmas(20, 5.0)[1:-1] > shifted_sigmas(20, 3.0)[1:-1]).all()
    # An even spacing over 1000 training levels, without a shift.
    assert torch.allclose(shifted_sigmas(4, 1.0), torch.tensor([1.0, 0.667, 0.334, 0.001, 0.0]), atol=1e-7)


def test_euler_finds_the_data_where_the_velocity_is_true() -> None:
    """With the true velocity noise - data, every step count ends at the data."""
    noise, data = draw_noise([1, 2], (4, 4))
    for num_steps in STEPS:
        *_, last = denoise(lambda latents, i: noise - data, noise, Euler(shifted_sigmas(num_steps, 3.0)))
        assert torch.allclose(last.latents, data, atol=1e-5)


def test_latents_stay_float32_whatever_the_model_gives() -> None:
    noise = draw_noise([1], (4,))
    solvers = (Euler(shifted_sigmas(3, 3.0)), solver_from_config(UNIPC, 3))
    for solver in solvers:
        for state in denoise(lambda latents, i: latents.bfloat16(), noise, solver):
            assert state.latents.dtype == torch.float32


# What a checkpoint's scheduler_config.json may say


def test_our_own_euler_serves_the_plain_configuration() -> None:
    published = {
        **EULER,
        "num_train_timesteps": 1000,
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "invert_sigmas": False,
        "max_shift": 1.15,
        "shift_terminal": None,
        "stochastic_sampling": False,
        "time_shift_type": "exponential",
        "use_beta_sigmas": False,
        "use_dynamic_shifting": False,
    }
    for config in (published, EULER):
        solver = solver_from_config(config, 5)
        assert isinstance(solver, Euler)
        assert torch.equal(solver.sigmas, shifted_sigmas(5, 3.0))
    assert torch.equal(solver_from_config({"_class_name": SCHEDULERS[0]}, 5).sigmas, shifted_sigmas(5, 1.0))


@pytest.mark.parity
@pytest.mark.parametrize("special", [{"use_karras_sigmas": True}, {"invert_sigmas": True}, {"shift_terminal": 0.1}])
def test_the_library_serves_what_our_own_does_not_know(special) -> None:
    solver = solver_from_config({**EULER, **special}, 5)
    assert isinstance(solver, LibrarySolver)
    theirs = library_scheduler("FlowMatchEulerDiscreteScheduler", 5, shift=3.0, **special)
    assert torch.equal(solver.timesteps, theirs.timesteps)
    assert not torch.equal(theirs.timesteps, library_euler(5, 3.0).timesteps)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "_class_name is None; the schedulers are FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler"),
        ({"_class_name": "DDIMScheduler"}, "_class_name is 'DDIMScheduler'; the schedulers are "),
        ({**EULER, "use_dynamic_shifting": True}, "use_dynamic_shifting is set; the shift must be a number"),
        ({**UNIPC, "prediction_type": "epsilon"}, "prediction_type is 'epsilon'; it must be 'flow_prediction'"),
        (
            {"_class_name": SCHEDULERS[1], "prediction_type": "flow_prediction"},
            "use_flow_sigmas is None; it must be True",
        ),
    ],
)
def test_a_scheduler_that_cannot_run_is_refused_with_its_file(config, problem) -> None:
    where = "wan/scheduler/scheduler_config.json"
    with pytest.raises(CheckpointError) as caught:
        solver_from_config(config, 4, where)
    assert caught.value.message.startswith(f"{where}: {problem}")
    with pytest.raises(CheckpointError) as without_torch:
        check_scheduler(config, where)
    assert without_torch.value.message == caught.value.message


def test_a_scheduler_is_checked_without_torch() -> None:
    code = (
        "import sys; from safelight.sampling.schedulers import check_scheduler\n"
        f"check_scheduler({UNIPC!r}); check_scheduler({EULER!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# The loop


@pytest.mark.parametrize("config", [EULER, UNIPC, {**EULER, "use_karras_sigmas": True}])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 8, 50])
def test_dx_064_as_many_calls_as_steps_were_asked_for(config, num_steps) -> None:
    calls = []

    def velocity(latents, i):
        calls.append(i)
        return bent(latents, i)

    noise = draw_noise([0], (2, 3))
    states = list(denoise(velocity, noise, solver_from_config(config, num_steps)))
    assert calls == list(range(num_steps))
    assert [(state.step, state.num_steps) for state in states] == [(i, num_steps) for i in range(num_steps + 1)]
    assert states[0].latents is noise
    assert all(state.latents.shape == noise.shape for state in states)


def test_a_state_is_there_before_the_next_step_is_taken() -> None:
    calls = []
    states = denoise(
        lambda latents, i: calls.append(i) or latents, draw_noise([0], (2,)), Euler(shifted_sigmas(3, 1.0))
    )
    for expected in range(4):
        assert next(states).step == expected
        assert len(calls) == expected
    assert next(states, None) is None


def test_states_keep_their_latents() -> None:
    noise = draw_noise([0], (8,))
    before = noise.clone()
    states = list(denoise(bent, noise, Euler(shifted_sigmas(4, 3.0))))
    assert torch.equal(noise, before)
    assert all(not torch.equal(a.latents, b.latents) for a, b in itertools.pairwise(states))


@pytest.mark.parametrize("after", [0, 2])
def test_a_cancelled_request_stops_before_its_next_step(after) -> None:
    token, calls = CancelToken(), []

    def velocity(latents, i):
        calls.append(i)
        return latents

    states = denoise(velocity, draw_noise([0], (2,)), Euler(shifted_sigmas(4, 1.0)), token)
    for _ in range(after + 1):
        next(states)
    token.cancel()
    with pytest.raises(Cancelled):
        next(states)
    assert len(calls) == after


def test_a_solver_can_be_made_again_for_every_request() -> None:
    """Solvers with a memory of earlier steps must not carry it into the next request."""
    noise = draw_noise([3], (4, 4))
    runs = [list(denoise(bent, noise, solver_from_config(UNIPC, 6)))[-1].latents for _ in range(2)]
    assert torch.equal(*runs)


# Noise

# Torch fills 16 values at a time where it can: below 16, and beside a multiple of it, it takes other ways.
SHAPES = [(1,), (3,), (15,), (16,), (17,), (3, 5), (2, 8), (4, 1, 3, 5), (12, 3, 8, 8), (16, 5, 9, 13)]


@pytest.mark.parametrize("shape", SHAPES)
def test_dx_002_each_output_is_what_its_seed_gives_alone(shape) -> None:
    seeds = [*output_seeds(7, 4), 2**63 - 1, 0, 2**32 + 5, 2**53 + 1, 7]
    noise = draw_noise(seeds, shape)
    assert noise.shape == (len(seeds), *shape) and noise.dtype == torch.float32 and noise.device.type == "cpu"
    for row, seed in enumerate(seeds):
        assert torch.equal(noise[row : row + 1], draw_noise([seed], shape))
    assert torch.equal(noise[0], noise[-1])
    assert len({tuple(row.flatten().tolist()) for row in noise}) == len(set(seeds))
    assert torch.equal(draw_noise(seeds[::-1], shape), noise.flip(0))


def test_noise_ignores_torchs_global_state() -> None:
    expected = draw_noise([7], (3, 5))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            drawn = draw_noise([7], (3, 5))
            sigmas = shifted_sigmas(3, 3.0)
        finally:
            torch.set_default_dtype(torch.float32)
    assert drawn.dtype == torch.float32 and torch.equal(drawn, expected)
    assert sigmas.device.type == "cpu" and torch.equal(sigmas, shifted_sigmas(3, 3.0))
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_what_torch_gives_for_the_seed() -> None:
    expected = torch.randn((1, 3, 5), generator=torch.Generator().manual_seed(7))
    assert torch.equal(draw_noise([7], (3, 5)), expected)
    assert torch.equal(draw_noise([7 + 2**32], (3, 5)), expected), "the generator reads more bits now: say so"


def test_noise_is_standard_normal() -> None:
    noise = draw_noise([5], (100_000,))
    assert noise.mean().abs() < 0.02 and (noise.std() - 1).abs() < 0.02


def test_seeds_count_on_from_the_first() -> None:
    assert output_seeds(7, 3) == [7, 8, 9]
    assert output_seeds(2**53 + 1, 2) == [2**53 + 1, 2**53 + 2]
    assert output_seeds(2**63 - 2, 4) == [2**63 - 2, 2**63 - 1, 0, 1]


@settings(max_examples=50)
@given(st.integers(0, 2**63 - 1), st.integers(1, 8))
def test_an_output_has_the_seed_that_makes_it_alone(seed, num_outputs) -> None:
    seeds = output_seeds(seed, num_outputs)
    assert seeds[0] == seed and len(seeds) == num_outputs
    assert all(output_seeds(one, 1) == [one] for one in seeds)
    assert all((b - a) % 2**63 == 1 for a, b in itertools.pairwise(seeds))


# Guidance


@pytest.mark.parametrize(("scale", "expected"), [(0, 1), (0.5, 1), (1, 1), (1.0, 1), (1.0001, 2), (5, 2), (7.5, 2)])
def test_guidance_of_one_or_less_needs_one_branch(scale, expected) -> None:
    assert branches(scale) == expected


def test_guidance_pushes_away_from_the_unconditional() -> None:
    conditional, unconditional = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0])
    assert torch.equal(guide(conditional, unconditional, 5.0), torch.tensor([6.0, 1.0]))
    assert torch.equal(guide(conditional, unconditional, 1.0), conditional)
    assert torch.equal(guide(conditional, unconditional, 0.0), unconditional)
