"""Engine and attention: what is planned for which call, and kernels that can't be loaded (S1, S11)."""

import asyncio
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from safelight.attention import AttentionBackend, AttentionPlan, declared_backends, forced_attention
from safelight.attention.backends.sdpa import BACKEND as SDPA
from safelight.config import Settings
from safelight.engine import Engine
from safelight.errors import BackendUnavailableError, SelectionError
from safelight.planning import check_model, preference_sources
from safelight.platforms import PackageFacts, probe_machine
from safelight.platforms.packages import Package
from safelight.request import Request
from tests.wan_reference import write_checkpoint

PROMPT = "a red circle moving right"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    return Engine.from_pretrained(tiny, device="cpu")


def whose(plan: AttentionPlan) -> str:
    """Who preferred what the transformer's self-attention has."""
    (layer,) = (
        row for row in plan.layers if (row.requirements.component, row.requirements.role) == ("transformer", "self")
    )
    return layer.selection.reason or layer.selection.preference.source


def test_the_forced_scope_is_nearest_while_it_lasts(engine: Engine) -> None:
    request = Request(prompt=PROMPT, attention={"": "sdpa"}, num_steps=1)
    with forced_attention({"transformer.self": "native"}):
        inside = engine.generate(request)
    assert whose(inside.plan) == "`forced_attention` scope"
    assert whose(engine.generate(request).plan) == "the request"
    assert whose(engine.plan()) == "platform default"


def test_threads_and_tasks_each_have_their_own_scope(engine: Engine) -> None:
    def plan_with(force: bool) -> str:
        if not force:
            return whose(engine.plan())
        with forced_attention("sdpa"):
            return whose(engine.plan())

    async def task(force: bool) -> str:
        if not force:
            await asyncio.sleep(0)
            return whose(engine.plan())
        with forced_attention("sdpa"):
            await asyncio.sleep(0)
            return whose(engine.plan())

    async def tasks() -> list[str]:
        return list(await asyncio.gather(*(task(index % 2 == 0) for index in range(6))))

    expected = ["`forced_attention` scope", "platform default"] * 3
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(plan_with, [index % 2 == 0 for index in range(6)])) == expected
    assert asyncio.run(tasks()) == expected


def test_equal_preferences_reuse_one_plan(engine: Engine) -> None:
    asked = Request(prompt=PROMPT, attention={"transformer": "sdpa"})
    assert engine.plan(asked) is engine.plan(asked.replace(prompt="another", seed=3))
    assert engine.plan(asked) is not engine.plan()


def broken_backend(name: str) -> AttentionBackend:
    def load(requirements):
        raise ImportError(f"lib{name}.so: undefined symbol")

    package = Package(key=name, dists=(f"{name}-kernels",), remedy="install it")
    return dataclasses.replace(SDPA, name=name, aliases=(), load=load, package=package)


def engine_with(tiny: Path, backend: AttentionBackend, attention: str | None) -> Engine:
    """An engine on this machine beside a backend whose package looks whole."""
    assert backend.package is not None
    machine = probe_machine("cpu")
    facts = PackageFacts(dist=backend.package.dists[0], version="1.0")
    return Engine(
        model="tiny",
        checkpoint=check_model(tiny),
        machine=machine.replace(packages={backend.package.key: facts}),
        dtype="float32",
        sources=preference_sources(argument=attention, argument_source="`attention` argument", settings=Settings()),
        # Without sdpa's place in the CPU's order, the broken one is the first that fits.
        backends={backend.name: backend, "zzz": dataclasses.replace(SDPA, name="zzz", aliases=())},
    )


def test_a_kernel_that_nobody_asked_for_and_that_cannot_be_loaded_is_planned_around(tiny: Path) -> None:
    made = engine_with(tiny, broken_backend("acme"), None)
    plan = made.plan()
    assert {layer.selection.backend for layer in plan.layers} == {"zzz"}
    assert made.machine.packages["acme"].import_error == "ImportError: libacme.so: undefined symbol"
    (verdict,) = plan.layers[0].selection.rejected
    assert verdict.reasons[0].detail == "package acme-kernels is broken: ImportError: libacme.so: undefined symbol"


def test_a_kernel_that_was_asked_for_and_that_cannot_be_loaded_is_an_error(tiny: Path) -> None:
    made = engine_with(tiny, broken_backend("acme"), "acme")
    with pytest.raises(BackendUnavailableError, match=r"acme.*ImportError: libacme\.so: undefined symbol"):
        made.plan()


@pytest.mark.parametrize("name", sorted(name for name, backend in declared_backends().items() if backend.load is None))
def test_a_kernel_without_an_adapter_is_refused_here(tiny: Path, name: str) -> None:
    with pytest.raises(SelectionError, match="adapter not built yet"):
        Engine.from_pretrained(tiny, device="cpu", attention={"transformer.self": name})


def test_a_plan_is_logged_once_with_a_line_per_component_and_refusals_at_debug_level(tiny: Path, caplog) -> None:
    caplog.set_level("DEBUG", "safelight.attention")
    made = Engine.from_pretrained(tiny, device="cpu", settings={"attention": "flash3"})
    made.generate(PROMPT, num_steps=1)
    told = [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records]
    assert [where for level, where in told if level == "INFO"] == ["text_encoder", "transformer", "vae"]
    refused = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    assert len(refused) == 4
    assert refused[1].startswith("transformer.self: not flash3: runs on cuda, this machine is cpu; ")


def test_threads_that_ask_at_once_get_one_plan_and_each_kernel_is_loaded_once(tiny: Path) -> None:
    loads: list[str] = []

    def load(requirements):
        time.sleep(0.02)  # long enough for the other threads to come by
        loads.append(f"{requirements.component}.{requirements.role}")
        return SDPA.load(requirements)

    slow = dataclasses.replace(broken_backend("slow"), load=load)
    made = engine_with(tiny, slow, None)
    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(lambda _: made.plan(), range(4)))
    assert len({id(plan) for plan in plans}) == 1
    assert sorted(loads) == ["text_encoder.self", "transformer.cross", "transformer.self", "vae.self"]
