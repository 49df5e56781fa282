"""A locked plan: what counts as a difference, and what is told about it (S14)."""

import dataclasses

import pytest

from safelight.attention import BackendPreference, LayerGroup, build_plan, declared_backends
from safelight.attention.lock import check_lock, differences, lock_text, read_lock
from safelight.errors import RequestError
from safelight.planning import layers_of
from safelight.platforms import load_machine

BACKENDS = declared_backends()
GROUPS = layers_of("wan2.1-1.3b")("bfloat16")
H200 = load_machine("h200")


def plan_on(machine=H200, *preferences, groups=GROUPS):
    return build_plan(groups, machine, [preferences], BACKENDS)


def flag(backend, names="", options=()):
    return BackendPreference(backend, "`--attention` flag", True, names, options)


def test_a_lock_comes_back_from_its_file(tmp_path) -> None:
    plan = plan_on()
    (tmp_path / "plan.json").write_text(lock_text(plan))
    assert read_lock(tmp_path / "plan.json") == plan
    assert differences(read_lock(tmp_path / "plan.json"), plan) == []
    check_lock(plan, plan)


def test_who_preferred_a_backend_and_why_is_no_difference() -> None:
    assert differences(plan_on(H200, flag("flash3", "transformer")), plan_on()) == []
    assert differences(plan_on(H200.replace(driver_version="99.9")), plan_on()) == []


def test_another_backend_is_a_difference_with_its_reason_and_the_facts_behind_it() -> None:
    bare = H200.replace(packages={}, driver_version="1.0")
    found = differences(plan_on(), plan_on(bare))
    assert found[0] == (
        "transformer.self (head_dim 128, bfloat16, 12 heads): locked x30 flash3, now x30 sdpa "
        f"(flash3: package flash-attn-3 is not installed ({BACKENDS['flash3'].package.remedy}))"
    )
    assert found[1].startswith("transformer.cross (head_dim 128, bfloat16, 12 heads): locked x30 flash3, now x30 sdpa")
    assert f"machine: driver_version was {H200.driver_version}, is 1.0" in found
    flash3 = H200.packages["flash_attn_3"]
    taking = ", ".join(flash3.parameters)
    assert f"machine: flash_attn_3 was {flash3.dist} {flash3.version} taking {taking}, is not installed" in found


def test_layers_that_are_new_gone_or_more_are_differences() -> None:
    first = GROUPS[0]
    more = (dataclasses.replace(first, count=first.count + 1), *GROUPS[1:])
    name = "text_encoder.self (head_dim 64, bfloat16, 64 heads)"
    assert differences(plan_on(), plan_on(groups=more)) == [f"{name}: locked x24 sdpa, now x25 sdpa"]
    assert differences(plan_on(), plan_on(groups=GROUPS[1:])) == [f"{name}: locked x24 sdpa, now none"]
    assert differences(plan_on(groups=GROUPS[1:]), plan_on()) == [f"{name}: locked none, now x24 sdpa"]


def test_options_are_part_of_what_runs() -> None:
    one, other = (plan_on(H200, flag("sdpa", "transformer", (("window", window),))) for window in (3, 5))
    assert differences(one, other)[0].endswith("locked x30 sdpa window=3, now x30 sdpa window=5")


def test_scope_tells_layers_apart() -> None:
    need = GROUPS[1].requirements
    scoped = [LayerGroup(requirements=need, count=1, supported=frozenset({"sdpa"}))]
    found = differences(plan_on(groups=scoped), plan_on(groups=[LayerGroup(requirements=need, count=1)]))
    assert [line.rpartition(": ")[2] for line in found] == ["locked x1 sdpa, now none", "locked none, now x1 flash3"]


def test_all_differences_are_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        check_lock(plan_on(), plan_on(H200.replace(packages={})))
    assert len(caught.value.details["differences"]) >= 3
    assert [line for line in caught.value.details["differences"] if line not in caught.value.message] == []
