"""A backend in an outside package: the one of docs/adding-a-backend.md, installed, planned and run; and broken ones."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from safelight.attention import (
    AttentionRequirements,
    BackendPreference,
    LayerGroup,
    build_plan,
    declared_backends,
    select_backend,
)
from safelight.attention.reference import reference_attention
from safelight.attention.runtime import load_plan
from safelight.attention.select import found_backends, why_not
from safelight.errors import BackendUnavailableError, CapabilityError
from safelight.platforms import DeviceFacts, MachineFacts, PackageFacts
from safelight.platforms.packages import probe_packages
from tests.rules.documents import blocks

PAGE = Path(__file__).parents[2] / "docs/adding-a-backend.md"
OWN = set(declared_backends())

SELF = AttentionRequirements(head_dim=64, dtype="float32", num_heads=4, num_kv_heads=2, equal_lengths=True)
CROSS = SELF.replace(role="cross", equal_lengths=False, num_kv_heads=4)
CPU = MachineFacts(platform="cpu", devices=(DeviceFacts(arch="cpu-avx2", name="made up"),))
WITH_ACME = CPU.replace(packages={"acme_attention": PackageFacts(dist="acme-attention", version="1.0")})


class Site:
    """A folder on sys.path into which a test installs distributions."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def install(self, project: dict, files: dict[str, str]) -> None:
        """What an installer leaves: the files, the metadata and the entry points of a pyproject.toml."""
        for path, text in files.items():
            self.write(path, text)
        name, version = project["name"], project["version"]
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.write(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))
        points = [
            line
            for group, entries in project["entry-points"].items()
            for line in (f"[{group}]", *(f"{point} = {value}" for point, value in entries.items()))
        ]
        self.write(f"{info}/entry_points.txt", "\n".join(points) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def acme(site):
    """The documented package, installed."""
    python = [block.code for block in blocks(PAGE) if block.language == "python"]
    paths = re.findall(r"^`(acme_attention/\w+\.py)`:$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    (toml,) = (block.code for block in blocks(PAGE) if block.language == "toml")
    site.install(tomllib.loads(toml)["project"], dict(zip(paths, python, strict=True)))
    return site


def plug_in(site, code, name="acme", target="made_up_kernels:BACKEND"):
    """A distribution of one module with one entry point."""
    project = {"name": "made-up-kernels", "version": "2.5", "entry-points": {"safelight.backends": {name: target}}}
    site.install(project, {"made_up_kernels.py": code})


def flag(name, names=""):
    return BackendPreference(name, "`--attention` flag", True, names)


def groups(*needs):
    return [LayerGroup(requirements=need, count=2) for need in needs]


def test_it_is_found_beside_those_of_safelight(acme) -> None:
    assert found_backends().failures == ()
    assert set(declared_backends()) == OWN | {"acme"}
    assert "acme_attention.kernel" not in sys.modules, "declaring a kernel doesn't import it"


def probed():
    return probe_packages([declared_backends()["acme"].package], {})["acme_attention"]


def test_its_package_is_recognised(acme) -> None:
    facts = probed()
    assert (facts.dist, facts.version, facts.import_error) == ("acme-attention", "1.0", None)
    assert facts.parameters == ("q", "k", "v", "alpha")


@pytest.mark.parametrize("name", ["acme", "acme_attn"])
def test_who_asks_for_it_gets_it(acme, name) -> None:
    selection = select_backend(SELF, WITH_ACME, flag(name))
    assert (selection.backend, selection.reason, selection.rejected) == ("acme", None, ())


def test_nobody_else_gets_it(acme) -> None:
    assert select_backend(SELF, WITH_ACME).backend == "sdpa"


def test_what_it_doesn_t_promise_is_refused(acme) -> None:
    with pytest.raises(CapabilityError, match="no causal"):
        select_backend(SELF.replace(causal=True), WITH_ACME, flag("acme"))
    odd = SELF.replace(num_heads=3, num_kv_heads=3)
    with pytest.raises(CapabilityError, match=r"no odd number of heads \(3\)"):
        select_backend(odd, WITH_ACME, flag("acme"))
    with pytest.raises(BackendUnavailableError, match="acme-attention is not installed"):
        select_backend(SELF, CPU, flag("acme"))


def test_it_is_planned_for_what_it_was_asked_for_and_runs(acme) -> None:
    backends = declared_backends()

    def plan(machine):
        needs = groups(SELF, CROSS, SELF.replace(component="text_encoder", is_auxiliary=True, mask="key_padding"))
        return build_plan(needs, machine, [[flag("acme")]], backends, runs_here=True)

    loaded = load_plan(plan, WITH_ACME, backends)
    assert [(layer.selection.backend, layer.selection.reason) for layer in loaded.plan.layers] == [
        ("acme", None),
        ("acme", None),
        ("sdpa", "not required for text_encoder"),
    ]
    generator = torch.Generator().manual_seed(0)
    for need, tokens, keys, scale in ((SELF, 9, 9, None), (CROSS, 9, 5, 0.3)):
        backend, kernel = loaded.kernels[need, None]
        q = torch.randn(2, tokens, need.num_heads, need.head_dim, generator=generator)
        k, v = torch.randn(2, 2, keys, need.num_kv_heads, need.head_dim, generator=generator)
        expected, _ = reference_attention(q, k, v, scale=scale)
        assert backend.name == "acme"
        assert (kernel(q, k, v, scale=scale) - expected).abs().max() < 1e-5


def test_a_kernel_that_can_t_be_loaded_is_named(acme) -> None:
    acme.write("acme_attention/kernel.py", "raise OSError('libacme.so.3: cannot open shared object file')\n")
    assert probed().import_error == "OSError: libacme.so.3: cannot open shared object file"
    backends = declared_backends()
    with pytest.raises(BackendUnavailableError, match=r"acme.*libacme\.so\.3: cannot open"):
        load_plan(lambda here: build_plan(groups(SELF), here, [[flag("acme")]], backends), WITH_ACME, backends)


# One that fails


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import acme_driver\n", "ModuleNotFoundError: No module named 'acme_driver'"),
        ("raise OSError('libacme.so: wrong ELF class')\n", "OSError: libacme.so: wrong ELF class"),
        ("raise RuntimeError('no device\\nsecond line')\n", "RuntimeError: no device"),
        ("assert False, 'built without CUDA'\n", "AssertionError: built without CUDA"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("def BACKEND(:\n", "SyntaxError: invalid syntax (made_up_kernels.py, line 1)"),
        ("", "AttributeError: module 'made_up_kernels' has no attribute 'BACKEND'"),
        ("BACKEND = 'acme'\n", "it is of class str, not AttentionBackend"),
        (
            "from safelight.attention import AttentionBackend\nBACKEND = AttentionBackend(name='acme')\n",
            "TypeError: AttentionBackend.__init__() missing 2 required keyword-only arguments: 'summary' and 'load'",
        ),
    ],
)
def test_a_plug_in_that_fails_is_one_recorded_failure(site, code, cause) -> None:
    plug_in(site, code)
    (failure,) = found_backends().failures
    assert (failure.name, failure.cause) == ("acme", cause)
    assert failure.origin == "acme = made_up_kernels:BACKEND of made-up-kernels 2.5"
    assert set(declared_backends()) == OWN | {"acme"}, "it stands among them, to say why it can't serve"
    assert select_backend(SELF, CPU).backend == "sdpa"
    plan = build_plan(groups(SELF, CROSS), CPU, [], declared_backends())
    assert [layer.selection.backend for layer in plan.layers] == ["sdpa", "sdpa"]
    with pytest.raises(BackendUnavailableError) as caught:
        select_backend(SELF, CPU, flag("acme"))
    assert f"the plug-in {failure.origin} doesn't load: {cause}" in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "name"),
    [("name='flash2'", "flash2"), ("name='acme', aliases=('fa3',)", "fa3"), ("name='npu'", "npu")],
)
def test_a_plug_in_can_t_take_a_name_over(site, arguments, name) -> None:
    before = {backend: why_not(backend, SELF, CPU, declared_backends()) for backend in OWN}
    plug_in(
        site,
        "from safelight.attention import AttentionBackend\n"
        f"BACKEND = AttentionBackend(summary='another', load=None, {arguments})\n",
    )
    (failure,) = found_backends().failures
    assert f"claims the name {name!r}" in failure.cause
    assert set(declared_backends()) == OWN | {"acme"}
    assert {backend: why_not(backend, SELF, CPU, declared_backends()) for backend in OWN} == before


def test_a_broken_plug_in_costs_the_others_nothing(acme) -> None:
    plug_in(acme, "raise RuntimeError('no device')\n", name="broken")
    assert [failure.name for failure in found_backends().failures] == ["broken"]
    assert select_backend(SELF, WITH_ACME, flag("acme")).backend == "acme"


def test_the_page_holds_it_to_the_contract(acme) -> None:
    """The page's own test, case by case."""
    from acme_attention import test_contract

    assert len(test_contract.PROMISED) > 50
    for case in test_contract.PROMISED:
        test_contract.test_contract(case)
