"""Imports point down, vendor packages wait until they are used, and every dependency is declared."""

import ast
import re
import tomllib

import pytest

import safelight
from tests.rules.source import ROOT, Module, modules

# From the bottom up. A part may import what stands above it in this list, itself, and the neighbours named below.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "catalog"),
    ("config", "request", "media", "naming", "text"),
    ("platforms",),
    ("attention",),
    ("layers",),
    ("sampling", "weights", "distributed"),
    ("models",),
    ("pipelines",),
    ("planning",),
    ("engine",),
    ("cli", "server", "demo", "__main__"),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

# Neighbours on one layer that may import each other.
NEIGHBOURS = {
    ("media", "naming"): "a media file is written under a free name",
    ("media", "request"): "a media file is written from a Result",
    ("request", "media"): "Result.save writes media files, and imports the writer only then",
    ("__main__", "cli"): "python -m safelight is the command",
}

# A higher layer's class, in an annotation or where it is first used, never at module top: each is a decision.
UPWARD = {
    ("safelight.request", "safelight.attention.plan"): "a Result carries the plan that ran, and reads it from JSON",
}

# What may be imported at module top: numbers and tensors anywhere that isn't promised to be torch-free (test_lazy.py),
# anything else only where the file is all about it.
TOP_LEVEL = {"numpy", "torch"}
TOP_LEVEL_IN = {
    ("demo", "diffusers"): "trains diffusers' own classes",
    ("demo", "transformers"): "trains transformers' own classes",
    ("demo", "PIL"): "draws the picture in the README",
    ("demo", "tokenizers"): "makes the tokenizer",
    ("weights", "safetensors"): "reads checkpoints",
}

# A package's name on the left where it isn't what it is imported by.
IMPORTED_AS = {"pillow": "PIL"}

ALL = modules()
NAMES = [module.name for module in ALL]


def dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


def direction_problem(module: Module, target: str, line: int, when: str) -> str | None:
    above = target.partition(".")[2].split(".")[0]
    where = f"{module.name}, line {line}"
    if above == "__version__":
        return None
    if not above or above in safelight.__all__:
        return f"{where}: imports {target} by the front door; name its own module"
    assert above in RANK, f"{where}: safelight.{above} has no layer; give it one in LAYERS"
    if above == module.part or RANK[above] < RANK[module.part]:
        return None
    if (module.part, above) in NEIGHBOURS or (when != "top" and (module.name, target) in UPWARD):
        return None
    return f"{where}: {module.part} is below or beside {above}, and imports {target}"


@pytest.mark.parametrize("module", [module for module in ALL if module.part], ids=lambda module: module.name)
def test_imports_point_down(module: Module) -> None:
    assert module.part in RANK, f"safelight.{module.part} has no layer; give it one in LAYERS"
    found = [
        direction_problem(module, item.target, item.line, item.when)
        for item in module.imports
        if item.distribution == "safelight"
    ]
    assert [problem for problem in found if problem] == []


def test_an_upward_import_is_seen() -> None:
    engine = Module(ROOT / "src/safelight/engine.py")
    errors = Module(ROOT / "src/safelight/errors.py")
    request = Module(ROOT / "src/safelight/request.py")
    assert direction_problem(engine, "safelight.errors", 1, "top") is None
    assert direction_problem(errors, "safelight.engine", 1, "deferred") is not None
    assert direction_problem(engine, "safelight", 1, "top") is not None
    assert direction_problem(engine, "safelight.Request", 1, "top") is not None
    assert direction_problem(errors, "safelight.__version__", 1, "top") is None
    assert direction_problem(request, "safelight.attention.plan", 1, "types") is None
    assert direction_problem(request, "safelight.attention.plan", 1, "top") is not None
    assert direction_problem(request, "safelight.config", 1, "top") is not None


def test_every_allowance_is_used() -> None:
    """A rule with exceptions that nobody needs is weaker than it looks."""
    everything = [(module, item) for module in ALL for item in module.imports]
    parts = {(module.part, item.target.split(".")[1]) for module, item in everything if "safelight." in item.target}
    assert {pair for pair in NEIGHBOURS if pair[0] in {module.part for module in ALL}} <= parts
    assert set(UPWARD) <= {(module.name, item.target) for module, item in everything if item.when != "top"}
    assert set(TOP_LEVEL_IN) <= {(module.part, item.distribution) for module, item in everything if item.when == "top"}


@pytest.mark.parametrize("module", ALL, ids=NAMES)
def test_vendor_packages_are_imported_where_they_are_used(module: Module) -> None:
    found = [
        f"line {item.line}: {item.target}"
        for item in module.imports
        if item.is_vendor
        and item.when == "top"
        and item.distribution not in TOP_LEVEL
        and (module.part, item.distribution) not in TOP_LEVEL_IN
    ]
    assert found == [], f"{module.name} imports at module top; move it into the function that uses it"


@pytest.mark.parametrize("module", ALL, ids=NAMES)
def test_every_package_used_is_a_declared_dependency(module: Module) -> None:
    if module.name.startswith("safelight.attention.backends."):
        return  # A kernel's package is optional by nature; load() imports it.
    declared = dependencies()
    found = [f"line {item.line}: {item.target}" for item in module.imports if item.is_vendor]
    assert [text for text in found if text.split()[-1].split(".")[0] not in declared] == []


def test_every_dependency_is_used() -> None:
    used = {item.distribution for module in ALL for item in module.imports if item.is_vendor}
    assert dependencies() - used == set()


@pytest.mark.parametrize("module", ALL, ids=NAMES)
def test_models_and_samplers_never_name_a_backend(module: Module) -> None:
    """They see an attention callable: a name in their code would be a choice that no plan records."""
    if module.part not in ("layers", "models", "sampling"):
        return
    backends = {item.path.stem for item in ALL if item.name.startswith("safelight.attention.backends.")}
    found = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and node.value in backends
    ]
    assert found == []


@pytest.mark.parametrize("module", ALL, ids=NAMES)
def test_a_backend_is_found_by_the_catalogue_alone(module: Module) -> None:
    """Nobody imports one backend: then adding a file is all it takes to add one."""
    if module.part == "demo":
        return  # A training program is no user: it picks its kernel itself.
    imported = [item.target for item in module.imports if item.target.startswith("safelight.attention.backends.")]
    assert imported == []
