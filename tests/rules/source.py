"""The repository as data for the rules: its modules, what they import and when, and its text files."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "safelight"

When = Literal["top", "deferred", "types"]


@dataclass(frozen=True)
class Import:
    """One imported module (or public name of `safelight` itself): at import, in a function, or for types only."""

    target: str
    line: int
    when: When

    @property
    def distribution(self) -> str:
        """The first part of the name: what has to be installed."""
        return self.target.split(".")[0]

    @property
    def is_vendor(self) -> bool:
        """Whether it is neither ours nor Python's."""
        return self.distribution != "safelight" and self.distribution not in sys.stdlib_module_names


@dataclass(frozen=True)
class Module:
    """One Python file of the package."""

    path: Path

    @property
    def name(self) -> str:
        """The name it is imported by."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def part(self) -> str:
        """The first name under `safelight`: a layer of the design. Empty for `safelight` itself."""
        return self.name.split(".")[1] if "." in self.name else ""

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.path.read_text(encoding="utf-8"), filename=str(self.path))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Everything it imports, wherever that stands."""
        return tuple(_imports(self))


def modules() -> list[Module]:
    """Every Python file of the package, in order of name."""
    return sorted((Module(path) for path in PACKAGE.rglob("*.py")), key=lambda module: module.name)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _walk(node: ast.AST, when: When) -> Iterator[tuple[ast.AST, When]]:
    yield node, when
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            inner = when
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and field == "body":
                inner = "deferred"
            if _is_type_checking(node) and field == "body":
                inner = "types"
            yield from _walk(child, inner)


def statements(module: Module) -> Iterator[tuple[ast.AST, When]]:
    """Every node of a module with when it runs."""
    return _walk(module.tree, "top")


def _exists(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def _imports(module: Module) -> Iterator[Import]:
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node, when in statements(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, when)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]) if base else ".".join(above)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                is_module = base.split(".")[0] == "safelight" and (base == "safelight" or _exists(whole))
                yield Import(whole if is_module else base, node.lineno, when)


def python_files() -> list[Path]:
    """Every Python file of the repository: the package, its tests and its programs."""
    folders = ("src", "tests", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    """Every file that a person reads: code, documents, scripts, settings and the package's JSON."""
    documents = [path for folder in ("docs",) for path in (ROOT / folder).rglob("*.md")]
    scripts = [path for folder in ("scripts", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    top = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / ".gitignore"]
    return sorted({*python_files(), *documents, *scripts, *top, *PACKAGE.rglob("*.json")})


def shown(path: Path) -> str:
    """A path as a test's name shows it."""
    return path.relative_to(ROOT).as_posix()
