"""MachineFacts as a value: compared, hashed, copied, pickled, and the same after JSON."""

import copy
import json
import pickle

import pytest

from safelight.platforms import DeviceFacts, MachineFacts, PackageFacts, load_machine, machine_names

PACKAGES = {
    "flash_attn_2": PackageFacts(dist="flash_attn", version="2.8.3", variant="triton", parameters=("q", "k", "v")),
    "amd_aiter": PackageFacts(dist="amd-aiter", import_error="OSError: no\u2026"),
    "xformers": PackageFacts(dist="xformers", parameters=()),
}
FULL = MachineFacts(
    platform="rocm",
    devices=(DeviceFacts(arch="gfx942", name="AMD", memory_bytes=2**37), DeviceFacts(arch="gfx90a", name="MI250")),
    torch_version="2.13.0",
    hip_version="7.1",
    driver_version="6.16",
    packages=PACKAGES,
    env={"A": "1", "B": ""},
    notes=("one", "two"),
)
ALL = [FULL, MachineFacts(platform="cpu"), *map(load_machine, machine_names())]
IDS = ["full", "bare", *machine_names()]

every_machine = pytest.mark.parametrize("facts", ALL, ids=IDS)


@every_machine
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda facts: pickle.loads(pickle.dumps(facts)), lambda facts: facts.replace()],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_a_copy_is_the_same_value(facts, duplicate):
    made = duplicate(facts)
    assert made == facts
    assert made is not facts
    assert hash(made) == hash(facts)
    assert made.to_json() == facts.to_json()


@every_machine
def test_json_gives_the_same_value_back(facts):
    data = json.loads(json.dumps(facts.to_json()))
    assert MachineFacts.from_json(data) == facts
    assert MachineFacts.from_json(data).to_json() == data


def test_the_order_of_packages_and_switches_is_no_difference():
    other = FULL.replace(packages=dict(reversed(PACKAGES.items())), env={"B": "", "A": "1"})
    assert other == FULL
    assert hash(other) == hash(FULL)
    assert len({other, FULL}) == 1
    assert json.dumps(other.to_json()) == json.dumps(FULL.to_json())


@pytest.mark.parametrize(
    "change",
    [
        {"platform": "cuda"},
        {"devices": FULL.devices[:1]},
        {"torch_version": None},
        {"cuda_version": "13.0"},
        {"hip_version": None},
        {"driver_version": None},
        {"packages": {}},
        {"packages": {**PACKAGES, "xformers": PackageFacts(dist="xformers", parameters=None)}},
        {"env": {"A": "1"}},
        {"notes": ("two", "one")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_counts(change):
    other = FULL.replace(**change)
    assert other != FULL
    assert hash(other) != hash(FULL)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda facts: pickle.loads(pickle.dumps(facts))])
def test_a_copy_cannot_be_changed_either(duplicate):
    made = duplicate(FULL)
    with pytest.raises(TypeError):
        made.packages["x"] = PACKAGES["xformers"]
    with pytest.raises(TypeError):
        made.env["A"] = "2"
    with pytest.raises(AttributeError):
        made.platform = "cuda"


def test_what_it_was_made_of_may_change_without_it():
    packages = dict(PACKAGES)
    facts = FULL.replace(packages=packages)
    packages.clear()
    assert facts == FULL
