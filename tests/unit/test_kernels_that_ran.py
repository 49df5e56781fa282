"""What ran is on record: plan, log, result and the kernels' own counts agree, for kernels from an outside package."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from safelight.engine import Engine
from safelight.errors import KernelError, SelectionError
from safelight.request import Request
from tests.unit.site_packages import install
from tests.wan_reference import write_checkpoint

PROMPT = "a red circle moving right"
STEPS = 3
KERNELS = """
import dataclasses
from safelight.attention.backends.sdpa import BACKEND as SDPA

CALLS = []  # (backend, role, layout's grid) of every call
FAIL_AT = {}  # backend -> (number of the call, error)


def counting(name):
    def load(requirements):
        kernel = SDPA.load(requirements)

        def counted(q, k, v, *, scale=None, causal=False, mask=None, layout=None):
            CALLS.append((name, requirements.component, requirements.role, layout and layout.grid))
            at, error = FAIL_AT.get(name, (None, None))
            if at == sum(1 for call in CALLS if call[0] == name):
                raise error
            return kernel(q, k, v, scale=scale, causal=causal, mask=mask, layout=layout)

        return counted

    return load


def declare(name, **changes):
    return dataclasses.replace(SDPA, name=name, aliases=(), load=counting(name), **changes)


HALF = declare("half", dtypes=frozenset({"bfloat16", "float16"}))
COUNTED = declare("counted")
SPARSE = declare("sparse", is_sparse=True, self_only=True, masks=frozenset({"none"}))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """The outside package's module, installed for this test."""
    points = "[safelight.backends]\n" + "".join(f"{name.lower()} = kernels_that_count:{name}\n" for name in NAMES)
    install(tmp_path, "counting-kernels", files={"kernels_that_count.py": KERNELS}, entry_points=points)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernels_that_count", raising=False)
    import kernels_that_count

    yield kernels_that_count
    del sys.modules["kernels_that_count"]


NAMES = ("HALF", "COUNTED", "SPARSE")


def planned(result):
    return {
        (row["component"], row["role"]): (row["backend"], row["reason"])
        for row in json.loads(json.dumps(result.to_json()))["plan"]["layers"]
    }


def counts(kernels, component="transformer"):
    """Calls of each backend by role."""
    found = {}
    for name, where, role, _ in kernels.CALLS:
        if where == component:
            found[name, role] = found.get((name, role), 0) + 1
    return found


def test_dx_007_a_choice_that_cannot_be_met_calls_nothing(kernels, tiny) -> None:
    with pytest.raises(SelectionError, match="no dtype float32"):
        Engine.from_pretrained(tiny, device="cpu", attention={"transformer": "half"})
    assert kernels.CALLS == []


def test_dx_007_plan_log_result_and_counts_agree(kernels, tiny) -> None:
    engine = Engine.from_pretrained(tiny, device="cpu", attention={"transformer.self": "counted"})
    result = engine.generate(PROMPT, num_steps=STEPS)
    assert planned(result)["transformer", "self"] == ("counted", None)
    assert planned(result)["transformer", "cross"] == ("sdpa", "platform default")
    assert "self x2 counted (`attention` argument), cross x2 sdpa (platform default)" in str(engine.plan())
    assert counts(kernels) == {("counted", "self"): 2 * STEPS}


def test_dx_007_a_preference_that_does_not_fit_shows_what_was_wished_what_runs_and_why(kernels, tiny) -> None:
    engine = Engine.from_pretrained(tiny, device="cpu", settings={"attention": "half"})
    result = engine.generate(PROMPT, num_steps=1)
    (row,) = (row for row in result.to_json()["plan"]["layers"] if row["component"] == "vae")
    assert (row["backend"], row["reason"]) == ("sdpa", "platform default fallback")
    assert row["preference"] == {
        "backend": "half",
        "source": "settings that don't say who set them",
        "explicit": False,
    }
    assert row["rejected"][0]["backend"] == "half"
    assert kernels.CALLS == []


def test_dx_052_two_engines_never_influence_each_other(kernels, tiny) -> None:
    torch_function = F.scaled_dot_product_attention
    first = Engine.from_pretrained(tiny, device="cpu", attention="counted")
    second = Engine.from_pretrained(tiny, device="cpu")
    request = Request(prompt=PROMPT, seed=3, num_steps=STEPS)
    before = second.generate(request).outputs[0].frames
    assert kernels.CALLS == []
    first.generate(request)
    of_first = len(kernels.CALLS)
    assert of_first > 0
    again = second.generate(request)
    assert len(kernels.CALLS) == of_first
    assert (again.outputs[0].frames == before).all()
    assert {backend for backend, _ in planned(again).values()} == {"sdpa"}
    del first
    assert (second.generate(request).outputs[0].frames == before).all()
    assert len(kernels.CALLS) == of_first
    assert F.scaled_dot_product_attention is torch_function


def test_dx_053_a_sparse_kernel_serves_self_attention_and_is_told_the_grid(kernels, tiny) -> None:
    engine = Engine.from_pretrained(tiny, device="cpu", attention="sparse")
    result = engine.generate(PROMPT, num_steps=STEPS)
    assert planned(result) == {
        ("text_encoder", "self"): ("sdpa", "not required for text_encoder"),
        ("transformer", "self"): ("sparse", None),
        ("transformer", "cross"): ("sdpa", "dense cross-attention fallback"),
        ("vae", "self"): ("sparse", None),
    }
    assert counts(kernels) == {("sparse", "self"): 2 * STEPS}
    assert {grid for _, component, _, grid in kernels.CALLS if component == "transformer"} != {None}
    with pytest.raises(SelectionError, match="no role cross"):
        Engine.from_pretrained(tiny, device="cpu", attention={"transformer.cross": "sparse"})
    with pytest.raises(SelectionError, match="no mask bias"):
        Engine.from_pretrained(tiny, device="cpu", attention={"text_encoder": "sparse"})


@pytest.mark.parametrize("at", [1, 3, 2 * STEPS])
@pytest.mark.parametrize("guidance", [0, 5])
@pytest.mark.parametrize(
    "error", [RuntimeError("illegal memory access"), torch.OutOfMemoryError("out of memory")], ids=["kernel", "memory"]
)
@pytest.mark.parametrize("chosen", [True, False])
def test_dx_086_a_kernel_that_fails_while_running_ends_the_run_once(kernels, tiny, at, guidance, error, chosen) -> None:
    kernels.FAIL_AT["counted"] = (at, error)
    wish = {"transformer.self": "counted"}
    options = {"attention": wish} if chosen else {"settings": {"attention": wish}}
    engine = Engine.from_pretrained(tiny, device="cpu", **options)
    with pytest.raises(KernelError) as caught:
        engine.generate(PROMPT, num_steps=STEPS, guidance_scale=guidance)
    assert caught.value.__cause__ is error
    assert caught.value.details["backend"] == "counted"
    assert caught.value.details["layer"] == f"transformer.blocks.{(at - 1) % 2}.attn1.attend"
    assert caught.value.details["step"] == 1 + (at - 1) // 2
    assert counts(kernels)["counted", "self"] == at, "it was tried again"
    assert planned_backend(engine) == "counted", "out of memory isn't unsupported"
    kernels.FAIL_AT.clear()
    assert engine.generate(PROMPT, num_steps=1).outputs, "the engine is still good"


def planned_backend(engine):
    (row,) = (
        r for r in engine.plan().layers if (r.requirements.component, r.requirements.role) == ("transformer", "self")
    )
    return row.selection.backend
