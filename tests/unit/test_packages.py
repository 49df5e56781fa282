"""Attention packages: which are installed here, by their metadata and files, whatever has a name like theirs."""

import json
import os
import subprocess
import sys

import pytest

from safelight.attention import declared_backends
from safelight.platforms import PackageFacts
from safelight.platforms.packages import Package, probe_packages
from tests.unit.fake_packages import CODE, ENTRY, PARAMETERS, only, package, probe, site
from tests.unit.site_packages import install

__all__ = ["site"]


# What works


def test_a_package_that_works(site):
    install(site, "acme-kernels", "2.1.post3", files={"acme/__init__.py": CODE})
    assert probe(package(**ENTRY)) == {
        "acme": PackageFacts(dist="acme-kernels", version="2.1.post3", parameters=PARAMETERS)
    }
    assert "acme" not in sys.modules


def test_a_package_that_is_known_by_its_metadata_alone_costs_no_process(site, monkeypatch):
    install(site, "acme-kernels", files={"acme.py": "raise SystemExit"})
    monkeypatch.setattr(subprocess, "Popen", None)
    assert only(package()) == PackageFacts(dist="acme-kernels", version="1.0")


def test_a_package_that_is_not_installed_costs_no_process(site, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert probe(package(**ENTRY), package("nothing-of-that-name", key="other", **ENTRY)) == {}


def test_a_module_without_its_distribution_is_not_installed(site):
    (site / "acme.py").write_text(CODE, encoding="utf-8")
    assert probe(package(**ENTRY)) == {}


def test_no_packages_at_all():
    assert probe() == {}


def test_the_first_distribution_that_is_installed_counts(site):
    install(site, "acme-two", "2.0", files={"acme.py": CODE})
    install(site, "acme-three", "3.0")
    facts = only(package(dists=("acme-one", "acme-two", "acme-three"), **ENTRY))
    assert (facts.dist, facts.version) == ("acme-two", "2.0")


MODULES = {"acme-forward": "acme_forward"}
FORWARD = "def attend(q, k, v): ...\n"


@pytest.mark.parametrize(
    ("installed", "dist", "parameters"),
    [
        (("acme-kernels",), "acme-kernels", PARAMETERS),
        (("acme-forward",), "acme-forward", ("q", "k", "v")),
        (("acme-forward", "acme-kernels"), "acme-kernels", PARAMETERS),
    ],
)
def test_distributions_may_have_the_function_in_modules_of_their_own(site, installed, dist, parameters):
    files = {"acme-kernels": {"acme.py": CODE}, "acme-forward": {"acme_forward.py": FORWARD}}
    for name in installed:
        install(site, name, files=files[name])
    asked = package(dists=("acme-kernels", "acme-forward"), modules=MODULES, **ENTRY)
    assert only(asked) == PackageFacts(dist=dist, version="1.0", parameters=parameters)


def test_a_module_of_another_distribution_is_not_taken_for_this_one_s(site):
    install(site, "acme-forward", files={"acme.py": CODE})
    facts = only(package(dists=("acme-kernels", "acme-forward"), modules=MODULES, **ENTRY))
    assert facts.import_error == "ModuleNotFoundError: No module named 'acme_forward'"


def test_a_module_of_a_distribution_that_is_not_named_is_our_mistake():
    with pytest.raises(AssertionError, match="acme-forward"):
        package(dists=("acme-kernels",), modules=MODULES, **ENTRY)


@pytest.mark.parametrize("asked", ["acme-kernels", "acme_kernels", "Acme.Kernels"])
def test_a_distribution_s_name_may_be_written_in_any_way(site, asked):
    install(site, "Acme_Kernels", files={"acme.py": CODE})
    assert only(package(asked, **ENTRY)).dist == "Acme_Kernels"


def test_two_backends_may_share_a_package(site):
    install(site, "acme-kernels", files={"acme.py": CODE})
    assert list(probe(package(**ENTRY), package(**ENTRY))) == ["acme"]


def test_packages_come_by_name_in_whatever_order_they_are_asked(site):
    install(site, "acme-kernels", files={"acme.py": CODE})
    many = [package(key=key, **ENTRY) for key in ("b", "c", "a")]
    assert list(probe(*many)) == list(probe(*reversed(many))) == ["a", "b", "c"]


def test_nothing_is_remembered(site):
    info = install(site, "acme-kernels", files={"acme.py": CODE})
    assert only(package(**ENTRY)).import_error is None
    (site / "acme.py").write_text("raise OSError('no more')", encoding="utf-8")
    assert only(package(**ENTRY)).import_error == "OSError: no more"
    info.rename(site / "elsewhere")
    assert probe(package(**ENTRY)) == {}


def test_the_variant_is_told_from_files_and_environment(site):
    install(site, "acme-kernels", "3.0", files={"acme.py": CODE, "acme_cuda.so": ""})
    seen = []

    def variant(installed, env):
        seen.append((installed.dist, installed.version, "acme_cuda.so" in installed.files))
        return env.get("ACME_TRITON")

    assert only(package(variant=variant), env={"ACME_TRITON": "triton"}).variant == "triton"
    assert only(package(variant=variant)).variant is None
    assert seen == [("acme-kernels", "3.0", True)] * 2


# What must be there too


def test_a_needed_module_that_is_missing_is_the_cause_and_costs_no_process(site, monkeypatch):
    install(site, "acme-kernels", files={"acme.py": CODE})
    monkeypatch.setattr(subprocess, "Popen", None)
    facts = only(package(needs=("json", "nothing_of_that_name"), **ENTRY))
    assert facts.import_error == "the module nothing_of_that_name, which it needs, isn't installed"


def test_a_needed_module_is_looked_for_and_not_imported(site):
    install(site, "acme-kernels", files={"acme.py": CODE, "needed/__init__.py": "raise OSError('was imported')"})
    assert only(package(needs=("needed",), **ENTRY)).import_error is None
    assert "needed" not in sys.modules


def test_a_folder_that_only_has_the_name_is_no_module(site):
    install(site, "acme-kernels", files={"acme.py": CODE, "triton_of_this_test/readme.txt": ""})
    facts = only(package(needs=("triton_of_this_test",), **ENTRY))
    assert facts.import_error == "the module triton_of_this_test, which it needs, isn't installed"


def test_a_needed_module_that_cannot_be_looked_for(site, monkeypatch):
    install(site, "acme-kernels", files={"acme.py": CODE})
    monkeypatch.setitem(sys.modules, "strange", type(sys)("strange"))
    error = only(package(needs=("strange",), **ENTRY)).import_error
    assert error == "the module strange, which it needs, can't be looked for: ValueError: strange.__spec__ is None"


def test_a_dotted_need_is_our_mistake():
    with pytest.raises(AssertionError, match=r"flash_attn\.cute"):
        package(needs=("flash_attn.cute",))


PACKAGES = {backend.package.key: backend.package for backend in declared_backends().values() if backend.package}


@pytest.mark.parametrize("key", PACKAGES)
def test_a_declared_package_names_its_distribution_and_its_remedy_and_whole_entry_points(key):
    declared = PACKAGES[key]
    assert declared.dists and declared.remedy
    assert (declared.function, declared.flag) == (None, None) or declared.module is not None


# What has its name from somebody else


def test_dx_023_another_package_of_the_same_name_is_not_ours(site):
    """PyPI's aiter is about asynchronous iterators."""
    install(site, "aiter", "0.13.20191203", files={"aiter/__init__.py": "raise OSError('the wrong one')"})
    amd_aiter = Package(
        key="amd_aiter",
        dists=("amd-aiter", "aiter"),
        remedy="",
        owns="aiter/ops/mha.py",
        module="aiter",
        function="flash_attn_func",
    )
    assert probe(amd_aiter) == {}
    install(
        site, "amd-aiter", "0.1.7", files={"aiter/__init__.py": "def flash_attn_func(q): ...", "aiter/ops/mha.py": ""}
    )
    assert only(amd_aiter) == PackageFacts(dist="amd-aiter", version="0.1.7", parameters=("q",))


FLASH_2 = Package(
    key="flash_attn_2",
    dists=("flash-attn",),
    remedy="",
    owns="flash_attn/flash_attn_interface.py",
    module="flash_attn",
    function="flash_attn_func",
)
FLASH_4 = Package(
    key="flash_attn_4",
    dists=("flash-attn-4",),
    remedy="",
    owns="flash_attn/cute/interface.py",
    module="flash_attn.cute",
    function="flash_attn_func",
)
TWO = {
    "flash_attn/__init__.py": "from flash_attn.flash_attn_interface import flash_attn_func\n",
    "flash_attn/flash_attn_interface.py": "def flash_attn_func(q, k, v, dropout_p=0.0): ...\n",
    "flash_attn/cute/__init__.py": "from flash_attn.cute.interface import flash_attn_func\n",
    "flash_attn/cute/interface.py": "def flash_attn_func(q, k, v, old): ...\n",
}
FOUR = {
    "flash_attn/cute/__init__.py": "from flash_attn.cute.interface import flash_attn_func\n",
    "flash_attn/cute/interface.py": "def flash_attn_func(q, k, v, qv=None): ...\n",
}


def test_flash_attn_4_alone_is_not_flash_attn_2(site):
    install(site, "flash-attn-4", "4.0.0b36", files=FOUR)
    assert probe(FLASH_2, FLASH_4) == {
        "flash_attn_4": PackageFacts(dist="flash-attn-4", version="4.0.0b36", parameters=("q", "k", "v", "qv"))
    }


def test_flash_attn_2_brings_an_older_cute_that_is_not_flash_attn_4(site):
    install(site, "flash-attn", "2.8.3", files=TWO)
    assert probe(FLASH_2, FLASH_4) == {
        "flash_attn_2": PackageFacts(dist="flash-attn", version="2.8.3", parameters=("q", "k", "v", "dropout_p"))
    }


def test_flash_attn_4_installed_after_flash_attn_2_serves_beside_it(site):
    install(site, "flash-attn", "2.8.3", files=TWO)
    install(site, "flash-attn-4", "4.0.0b36", files=FOUR)
    found = probe(FLASH_2, FLASH_4)
    assert {key: facts.import_error for key, facts in found.items()} == {"flash_attn_2": None, "flash_attn_4": None}
    assert found["flash_attn_4"].parameters == ("q", "k", "v", "qv")


def test_flash_attn_2_installed_after_flash_attn_4_has_overwritten_it(site):
    install(site, "flash-attn-4", "4.0.0b36", files=FOUR)
    install(site, "flash-attn", "2.8.3", files=TWO)
    found = probe(FLASH_2, FLASH_4)
    assert found["flash_attn_2"].import_error is None
    assert found["flash_attn_4"].import_error == (
        "flash-attn 2.8.3 has overwritten its flash_attn/cute/interface.py; "
        "install flash-attn-4 4.0.0b36 again, after the other"
    )


def test_a_file_that_a_person_has_changed_is_theirs(site):
    install(site, "flash-attn-4", "4.0.0b36", files=FOUR)
    (site / "flash_attn/cute/interface.py").write_text("def flash_attn_func(mine): ...\n", encoding="utf-8")
    assert only(FLASH_4).parameters == ("mine",)


def test_dx_023_xformers_beside_flash_attn_4_alone_names_the_real_cause(site):
    """Its import breaks on the namespace that flash-attn-4 leaves where it expects flash-attn 2."""
    install(site, "flash-attn-4", "4.0.0b36", files=FOUR)
    install(
        site,
        "xformers",
        "0.0.35",
        files={
            "xformers/__init__.py": "",
            "xformers/ops.py": "import importlib.util\nif importlib.util.find_spec('flash_attn'):\n"
            "    from flash_attn.flash_attn_interface import flash_attn_func\n",
        },
    )
    facts = only(Package(key="xformers", dists=("xformers",), remedy="", module="xformers.ops"))
    assert facts.import_error == "ModuleNotFoundError: No module named 'flash_attn.flash_attn_interface'"


# Installations of all kinds


def test_an_installation_without_a_list_of_files_is_judged_by_where_they_lie(site):
    install(site, "flash-attn", "2.8.3", files=TWO, record=False)
    assert only(FLASH_2).parameters == ("q", "k", "v", "dropout_p")
    install(site, "flash-attn-4", "4.0.0b36", record=False)
    (site / "flash_attn/cute/interface.py").unlink()
    assert list(probe(FLASH_2, FLASH_4)) == ["flash_attn_2"]


@pytest.mark.parametrize("top", ["", "src"])
def test_an_installation_in_place_is_judged_by_its_project(site, monkeypatch, top):
    project = site / "my project"
    for path, text in TWO.items():
        (project / top / path).parent.mkdir(parents=True, exist_ok=True)
        (project / top / path).write_text(text, encoding="utf-8")
    info = install(site, "flash-attn", "2.8.3")
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
    monkeypatch.syspath_prepend(str(project / top))
    assert only(FLASH_2).parameters == ("q", "k", "v", "dropout_p")
    assert probe(FLASH_4) == {}


@pytest.mark.parametrize("metadata", ["", "Metadata-Version: 2.1\n", "\0\0"])
def test_what_an_interrupted_installation_leaves_is_facts(site, metadata):
    install(site, "acme-kernels", files={"acme.py": CODE}, metadata=metadata)
    facts = only(package(**ENTRY))
    assert (facts.dist, facts.version) == ("acme-kernels", None)
    assert facts.parameters == PARAMETERS or facts.import_error.startswith("it can't be recognised: ")


def test_an_empty_folder_of_metadata_is_facts(site):
    (site / "acme_kernels-1.0.dist-info").mkdir()
    (facts,) = probe(package(module="acme")).values()
    assert facts.import_error


@pytest.mark.parametrize("text", ["{", "[]", '{"dir_info": {"editable": true}}'])
def test_an_origin_that_cannot_be_read_is_a_cause(site, text):
    info = install(site, "flash-attn", "2.8.3", files=TWO)
    (info / "direct_url.json").write_text(text, encoding="utf-8")
    facts = only(FLASH_2)
    assert facts.import_error.startswith("it can't be recognised: ")


def test_a_variant_that_cannot_be_told_is_a_cause(site):
    install(site, "acme-kernels", files={"acme.py": CODE})
    facts = only(package(variant=lambda installed, env: env["MISSING"], **ENTRY))
    assert "KeyError: 'MISSING'" in facts.import_error


def test_a_list_of_files_that_nobody_can_read_is_a_cause(site):
    info = install(site, "flash-attn", "2.8.3", files=TWO)
    (info / "RECORD").write_bytes(b"\xff\xfe\x00,,\n")
    facts = probe(FLASH_2).get("flash_attn_2")
    assert facts is None or facts.import_error


def test_what_is_declared_can_be_probed_on_this_machine():
    """Whatever is installed here, every declared package is asked, and nothing raises."""
    found = probe_packages(PACKAGES.values(), dict(os.environ))
    assert set(found) <= set(PACKAGES)
    assert all(isinstance(facts, PackageFacts) for facts in found.values())
