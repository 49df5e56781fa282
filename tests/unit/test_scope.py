"""forced_attention: nearer than all other sources, and seen by nobody beside it: threads, tasks, generators."""

import asyncio
import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from safelight.attention.requirements import AttentionRequirements
from safelight.attention.scope import SOURCE, forced_attention, forced_choices
from safelight.attention.select import BackendPreference, preferred
from safelight.config import Settings, attention_choices
from safelight.errors import RequestError, SafelightError

# Free-threaded Python hands the context of whoever starts a thread on to it.
INHERITS = bool(getattr(sys.flags, "thread_inherit_context", False))


def forced() -> list[dict[str, str]]:
    """What is forced where this is called: {what for: backend}, the innermost scope first."""
    return [{choice.names: choice.backend for choice in choices} for choices in forced_choices()]


@pytest.fixture(autouse=True)
def nothing_is_left():
    assert forced() == []
    yield
    assert forced() == []


# What a scope says


@pytest.mark.parametrize(
    ("attention", "choices"),
    [
        ("sdpa", {"": "sdpa"}),
        ("auto", {"": "auto"}),
        ({"transformer.self": "flash3", "vae": "sdpa"}, {"transformer.self": "flash3", "vae": "sdpa"}),
        ({"": "sdpa"}, {"": "sdpa"}),
        ("transformer.self=flash3,vae=sdpa", {"transformer.self": "flash3", "vae": "sdpa"}),
        ({}, {}),
    ],
)
def test_a_scope_holds_inside_its_block_alone(attention, choices):
    with forced_attention(attention):
        assert forced() == [choices]
        assert all(one.explicit and one.source == "`forced_attention` scope" for one in forced_choices()[0])
    assert forced() == []


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ("", "'' names no backend"),
        ("flash 3", "'flash 3' names no backend"),
        ({"transfomer.slef": "sdpa"}, "'slef' is no role; the roles are self, cross, joint (did you mean self?)"),
        ({"self": "sdpa"}, "'self' is a role"),
        ({"vae": None}, "'vae=None' names no backend"),
        ("sliding_tile:window=3x6x6", "gives options to sliding_tile, and no backend takes any"),
        (None, "None is no choice"),
    ],
)
def test_dx_088_what_can_be_no_name_is_refused_before_anything_runs(attention, said):
    ran = []
    with pytest.raises(RequestError) as caught, forced_attention(attention):
        ran.append(1)
    assert caught.value.message.startswith(f"{SOURCE}: ")
    assert said in caught.value.message
    assert ran == []


def test_what_a_scope_was_made_of_may_change_afterwards():
    given = {"transformer": "sdpa"}
    scope = forced_attention(given)
    given["transformer"] = "flash2"
    with scope:
        assert forced() == [{"transformer": "sdpa"}]


# Among the sources of rule S1


def source_of(layer: AttentionRequirements, sources) -> tuple[str, str] | None:
    preferences = [
        [BackendPreference(one.backend, one.source, one.explicit, one.names) for one in source] for source in sources
    ]
    found = preferred(layer, preferences)
    return None if found is None else (found.backend, found.source)


@pytest.mark.parametrize("missing", range(6))
def test_the_nearest_source_that_says_something_counts(missing):
    """Each source names every layer, so that leaving the nearest ones out shows the next."""
    settings = Settings.read({"SAFELIGHT_ATTENTION": "transformer=d"}, '[attention.transformer]\nself = "e"\n')
    layer = AttentionRequirements(head_dim=64, dtype="float32", num_heads=2, num_kv_heads=2)
    with forced_attention("a"):
        sources = [
            *forced_choices(),
            attention_choices({"transformer.self": "b"}, "the request"),
            attention_choices("c", "`--attention` flag"),
            *settings.attention,
        ]
    expected = [
        ("a", SOURCE),
        ("b", "the request"),
        ("c", "`--attention` flag"),
        ("d", "`SAFELIGHT_ATTENTION`"),
        ("e", "config.toml: attention.transformer.self"),
        None,
    ]
    assert source_of(layer, sources[missing:]) == expected[missing]


@pytest.mark.parametrize(
    ("component", "role", "expected"),
    [
        ("transformer", "self", ("b", SOURCE)),
        ("transformer", "cross", ("a", SOURCE)),
        ("vae", "self", None),
        ("text_encoder", "self", ("x", "`--attention` flag")),
    ],
)
def test_inside_another_scope_the_outer_one_holds_for_what_the_inner_one_leaves(component, role, expected):
    layer = AttentionRequirements(
        head_dim=64, dtype="float32", num_heads=2, num_kv_heads=2, component=component, role=role
    )
    with forced_attention({"transformer": "a", "vae": "a"}), forced_attention({"transformer.self": "b", "vae": "auto"}):
        assert forced() == [{"transformer.self": "b", "vae": "auto"}, {"transformer": "a", "vae": "a"}]
        assert source_of(layer, [*forced_choices(), attention_choices("x", "`--attention` flag")]) == expected


# Leaving it


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_an_error_leaves_it_too_and_is_passed_on(error):
    with forced_attention("a"):
        with pytest.raises(error), forced_attention("b"):
            raise error
        assert forced() == [{"": "a"}]


def test_one_scope_may_be_entered_again_and_inside_itself():
    scope = forced_attention("a")
    for _ in range(2):
        with scope, forced_attention("b"), scope:
            assert forced() == [{"": "a"}, {"": "b"}, {"": "a"}]
        assert forced() == []


# Threads


def test_dx_052_a_scope_is_not_seen_in_another_thread():
    seen = {}
    entered, looked = threading.Event(), threading.Event()

    def beside():
        entered.wait(10)
        seen["beside"] = forced()
        looked.set()

    thread = threading.Thread(target=beside)
    thread.start()
    with forced_attention("a"):
        entered.set()
        assert looked.wait(10)
        inside = threading.Thread(target=lambda: seen.update(inside=forced()))
        inside.start()
        inside.join()
        copied = contextvars.copy_context()
        with ThreadPoolExecutor(1) as pool:
            seen["copied"] = pool.submit(copied.run, forced).result()
    thread.join()
    # The copy is of what held when it was made.
    seen["later"] = copied.run(forced)
    here = [{"": "a"}]
    assert seen == {"beside": [], "inside": here if INHERITS else [], "copied": here, "later": here}


def test_dx_052_threads_with_one_scope_and_with_their_own_do_not_meet():
    shared = forced_attention("shared")
    barrier = threading.Barrier(4, timeout=10)

    def work(number: int) -> list[list[dict[str, str]]]:
        seen = []
        own = shared if number < 2 else forced_attention(f"own{number}")
        barrier.wait()
        with own:
            barrier.wait()
            seen.append(forced())
            with forced_attention({"vae": f"inner{number}"}):
                barrier.wait()
                seen.append(forced())
            barrier.wait()
            if number % 2:
                barrier.wait()  # the others leave their scope first
            seen.append(forced())
        if not number % 2:
            barrier.wait()
        return [*seen, forced()]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    for number, seen in enumerate(found):
        own = {"": "shared" if number < 2 else f"own{number}"}
        assert seen == [[own], [{"vae": f"inner{number}"}, own], [own], []]


# asyncio


def test_dx_052_tasks_side_by_side_do_not_meet():
    async def work(name: str, barrier: asyncio.Barrier, seen: list[list[dict[str, str]]]) -> None:
        with forced_attention(name):
            await barrier.wait()
            seen.append(forced())
            await barrier.wait()
        await barrier.wait()
        seen.append(forced())

    async def plain(barrier: asyncio.Barrier, seen: list[list[dict[str, str]]]) -> None:
        for _ in range(3):
            await barrier.wait()
            seen.append(forced())

    async def both():
        barrier = asyncio.Barrier(3)
        first, second, third = [], [], []
        await asyncio.gather(work("a", barrier, first), work("b", barrier, second), plain(barrier, third))
        return first, second, third

    assert asyncio.run(both()) == ([[{"": "a"}], []], [[{"": "b"}], []], [[], [], []])


def test_a_task_has_the_scope_it_was_started_in_and_keeps_it():
    async def look(go: asyncio.Event) -> list[dict[str, str]]:
        await go.wait()
        with forced_attention({"vae": "b"}):
            await asyncio.sleep(0)
            return forced()

    async def main():
        go = asyncio.Event()
        with forced_attention("a"):
            inside = asyncio.create_task(look(go))
            in_thread = await asyncio.to_thread(forced)
        outside = asyncio.create_task(look(go))
        go.set()
        return await inside, await outside, in_thread, forced()

    assert asyncio.run(main()) == ([{"vae": "b"}, {"": "a"}], [{"vae": "b"}], [{"": "a"}], [])


def test_a_cancelled_task_leaves_its_scope():
    async def main():
        seen = []

        async def work():
            try:
                with forced_attention("a"):
                    await asyncio.sleep(10)
            finally:
                seen.append(forced())

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    assert asyncio.run(main()) == [[]]


# Generators, which have no context of their own


def in_scope(name: str):
    with forced_attention(name):
        yield forced()
        yield forced()


def test_scopes_of_generators_end_in_any_order():
    first, second = in_scope("a"), in_scope("b")
    assert next(first) == [{"": "a"}]
    with forced_attention("c"):
        assert next(second) == [{"": "b"}, {"": "c"}, {"": "a"}]
        assert list(first) == [[{"": "b"}, {"": "c"}, {"": "a"}]]
        # Gone is the first one's, though it wasn't the innermost.
        assert forced() == [{"": "b"}, {"": "c"}]
    assert forced() == [{"": "b"}]
    second.close()
    assert forced() == []


def test_who_runs_a_generator_shares_its_scope_meanwhile():
    generator = in_scope("a")
    next(generator)
    assert forced() == [{"": "a"}]
    generator.close()
    assert forced() == []


def test_a_generator_whose_steps_run_in_different_contexts_is_told_so():
    """Its later steps wouldn't have the choices: that must not pass in silence."""
    generator = in_scope("a")
    assert contextvars.copy_context().run(next, generator) == [{"": "a"}]
    assert next(generator) == []
    with pytest.raises(SafelightError, match=r"entered in one context .* left in another"):
        next(generator)


def test_a_generator_closed_elsewhere_ends_quietly():
    generator = in_scope("a")
    contextvars.copy_context().run(next, generator)
    with forced_attention("b"):
        generator.close()
        assert forced() == [{"": "b"}]
