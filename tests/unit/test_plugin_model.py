"""A model family in an outside package: found by its pipeline's class, planned for, and a broken one told."""

import json

import pytest

from safelight.attention import declared_backends
from safelight.attention.grid import Grid
from safelight.errors import CheckpointError, RequestError
from safelight.planning import check_model, check_parallel, plan_model, sharing_of
from safelight.platforms import load_machine
from safelight.request import Request
from tests.unit.site_packages import install

FAMILY = """
from safelight.attention import AttentionRequirements, LayerGroup
from safelight.pipelines import Family


class AcmeCheckpoint:
    def __init__(self, index):
        self.folder = index.path.parent

    def layer_groups(self, dtype):
        return layer_groups({}, dtype)


def layer_groups(configs, dtype):
    need = AttentionRequirements(head_dim=64, dtype=dtype, num_heads=8, num_kv_heads=8, role="joint")
    return (LayerGroup(requirements=need, count=19),)


FAMILY = Family(name="acme", class_name="AcmePipeline", open=AcmeCheckpoint, layer_groups=layer_groups)
"""


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "AcmePipeline"}))
    return folder


@pytest.fixture
def acme(tmp_path, monkeypatch):
    def install_it(code, module="acme_models"):
        points = f"[safelight.models]\nacme = {module}:FAMILY\n"
        install(tmp_path, "acme-models", "1.0", files={f"{module}.py": code}, entry_points=points)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install_it


def test_its_checkpoints_are_opened_and_planned_for(model, acme) -> None:
    acme(FAMILY)
    assert check_model(model).folder == model
    (layer,) = plan_model(model, load_machine("h200"), declared_backends()).layers
    assert (layer.requirements.role, layer.count, layer.selection.backend) == ("joint", 19, "flash3")


def test_without_it_the_model_is_refused(model) -> None:
    with pytest.raises(CheckpointError, match=r"_class_name is AcmePipeline; the pipelines are WanPipeline$"):
        check_model(model)


def test_one_that_does_not_load_is_told_where_it_is_missed(model, acme) -> None:
    acme("raise OSError('libacme.so: cannot open')\n", "acme_broken")
    with pytest.raises(CheckpointError) as caught:
        check_model(model)
    assert caught.value.message.endswith(
        "the plug-in acme = acme_broken:FAMILY of acme-models 1.0 doesn't load: OSError: libacme.so: cannot open"
    )
    assert check_model(None).layer_groups("float32"), "it ends no run that doesn't ask for it"


def test_one_that_says_nothing_of_ranks_runs_on_one(model, acme) -> None:
    acme(FAMILY)
    for refused in (
        lambda: sharing_of(model, Request(prompt="a cat"), Grid(ring=2)),
        lambda: check_parallel(check_model(model), Grid(ring=2), Request(prompt="a cat")),
    ):
        with pytest.raises(RequestError, match=r"model is of a family that doesn't run on several ranks"):
            refused()


def test_it_cannot_take_a_built_in_pipeline_s_place(acme) -> None:
    acme(FAMILY.replace("AcmePipeline", "WanPipeline"), "acme_wan")
    assert type(check_model(None)).__name__ == "WanCheckpoint"
