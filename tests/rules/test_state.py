"""No hidden state: the environment is read in config.py alone, and nothing at module level changes after import."""

import ast
from collections.abc import Iterator

import pytest

from tests.rules.source import Module, modules, statements

ALL = modules()

# Expanding the "~" of a path that a person gave is not among them: the path is the setting.
ENVIRONMENT = {"environ", "environb", "expandvars", "getenv", "getenvb", "home", "putenv", "unsetenv"}
HOLDERS = {"os", "os.path", "Path", "pathlib.Path"}
CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("remove", "reverse", "setdefault", "sort", "update"),
}
CACHES = {"cache", "lru_cache"}


def environment_reads(module: Module) -> Iterator[tuple[int, str]]:
    """Where a module reaches for the environment: line, and when that runs."""
    for node, when in statements(module):
        taken: set[str] = set()
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in HOLDERS:
            taken = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module in HOLDERS:
            taken = {alias.name for alias in node.names}
        if taken & ENVIRONMENT:
            yield node.lineno, when


@pytest.mark.parametrize("module", ALL, ids=lambda module: module.name)
def test_the_environment_is_read_in_config_only_and_when_asked(module: Module) -> None:
    allowed = {"deferred"} if module.name == "safelight.config" else set()
    assert [line for line, when in environment_reads(module) if when not in allowed] == []


def test_config_does_read_the_environment() -> None:
    """The rule above would pass on anything if it saw nothing."""
    config = next(module for module in ALL if module.name == "safelight.config")
    assert list(environment_reads(config)) != []


def _names_bound(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def changes_of_module_state(module: Module) -> Iterator[str]:
    """Statements inside functions that change something the module's own top level has bound."""
    top: set[str] = set()
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            top |= _names_bound(statement)
    for function in ast.walk(module.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        arguments = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
        shared = top - _names_bound(function) - arguments
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield f"line {node.lineno}: global {', '.join(node.names)}"
            elif isinstance(node, ast.Subscript | ast.Attribute):
                is_change = not isinstance(node.ctx, ast.Load) or getattr(node, "attr", "") in CHANGING
                if is_change and ast.unparse(node.value) in shared:
                    yield f"line {node.lineno}: {ast.unparse(node)} is changed"
    for node in ast.walk(module.tree):
        for decorator in getattr(node, "decorator_list", []):
            name = ast.unparse(decorator).partition("(")[0].rpartition(".")[2]
            if name in CACHES:
                yield f"line {decorator.lineno}: @{name} keeps state in the module; cache on an object you own"


@pytest.mark.parametrize("module", ALL, ids=lambda module: module.name)
def test_no_module_state_changes(module: Module) -> None:
    assert sorted(set(changes_of_module_state(module))) == []


def test_a_change_is_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("state") / "example.py"
    path.write_text(
        "import functools\n"
        "SEEN = {}\nCOUNT = 0\nLIST = []\n"
        "def one():\n    SEEN['a'] = 1\n"
        "def two():\n    global COUNT\n    COUNT += 1\n"
        "def three():\n    LIST.append(1)\n"
        "def four(SEEN):\n    SEEN['a'] = 1\n"
        "@functools.cache\ndef five():\n    return SEEN['a']\n"
    )
    lines = sorted(int(text.split(":")[0].removeprefix("line ")) for text in changes_of_module_state(Module(path)))
    assert lines == [6, 8, 11, 14]


def test_the_forced_scope_is_the_only_context_variable() -> None:
    found = [
        module.name
        for module in ALL
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "ContextVar"
    ]
    assert found == ["safelight.attention.scope"]
