"""Attention packages: how each is recognised without importing it, and what a subprocess finds out about it."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safelight.catalog import BROKEN, cause_of
from safelight.platforms.facts import PackageFacts

if TYPE_CHECKING:
    from importlib.metadata import Distribution

SCRIPT = Path(__file__).with_name("_import_probe.py")
MOST_BYTES = 65_536  # of an answer; a pipe holds as much, so that the script never waits for a reader


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A distribution that is installed: its name as found, its version, and the files that it owns."""

    dist: str
    version: str
    files: frozenset[str] = frozenset()


def _no_variant(installed: Installed, env: Mapping[str, str]) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Package:
    """An attention package, as a backend declares it.

    `key` is Safelight's own name for it in MachineFacts.packages, since import names collide. `dists` are the
    distributions that may provide it, the first that is installed counts; one that doesn't own the file `owns` is
    another package of that name. `needs` are top-level modules that must be there too. `module` and `function` are the
    entry point, imported only in a subprocess, which reads its parameters; `modules` names the module of those `dists`
    that have the function in another. `flag` is an attribute of the module that is false, None or missing where its
    binary can't be used though the module imports, and `flag_reason` one that says why. `variant` tells builds of one
    version apart and is pure. `min_version` is the oldest that serves. `remedy` says
    how to install it.
    """

    key: str
    dists: tuple[str, ...]
    remedy: str
    owns: str | None = None
    needs: tuple[str, ...] = ()
    module: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    function: str | None = None
    flag: str | None = None
    flag_reason: str | None = None
    min_version: str | None = None
    variant: Callable[[Installed, Mapping[str, str]], str | None] = _no_variant

    def __post_init__(self) -> None:
        dotted = [name for name in self.needs if "." in name]
        assert not dotted, f"{self.key} needs {dotted}, but looking for what is inside a package imports it"
        unknown = sorted(set(self.modules) - set(self.dists))
        assert not unknown, f"{self.key} names the modules of {unknown}, which aren't among its distributions"


def probe_packages(
    packages: Iterable[Package], env: Mapping[str, str], *, timeout_s: float = 60.0
) -> dict[str, PackageFacts]:
    """The facts of those packages that are installed here, by their keys. Never raises for a broken one.

    `env` is given to `variant`. A package is recognised by its metadata and files, without being imported. What must be
    imported to be known is imported in a subprocess each, side by side, so that a wrong binary ends that process
    alone; one that gives no answer within `timeout_s` is ended. A package that isn't installed costs no process.
    """
    found: dict[str, PackageFacts] = {}
    running: dict[str, _Import] = {}
    try:
        for key, package in {package.key: package for package in packages}.items():
            recognised = _recognised(package, env)
            if recognised is None:
                continue
            found[key], module = recognised
            if found[key].import_error is None and module is not None:
                running[key] = _Import(package, module)
        deadline = time.monotonic() + timeout_s
        for key, process in running.items():
            found[key] = dataclasses.replace(found[key], **process.answer(deadline, timeout_s))
    finally:
        for process in running.values():
            process.end()
    return dict(sorted(found.items()))


def _recognised(package: Package, env: Mapping[str, str]) -> tuple[PackageFacts, str | None] | None:
    """What metadata and files tell about a package, and the module to import; None if it isn't installed."""
    from importlib.metadata import PackageNotFoundError, distribution  # costs more than the rest of this file

    for name in package.dists:
        try:
            dist = distribution(name)
            if package.owns is not None and not _owns(dist, package.owns):
                continue
            # What an interrupted installation leaves behind may tell neither name nor version.
            found: tuple[str | None, str | None] = (dist.name, dist.version)
            installed = Installed(
                dist=found[0] or name,
                version=found[1] or "",
                files=frozenset(str(file) for file in dist.files or ()),
            )
            problem = None if package.owns is None else _overwritten(dist, package.owns)
            facts = PackageFacts(
                dist=installed.dist,
                version=installed.version or None,
                variant=package.variant(installed, env),
                import_error=problem or _missing_module(package),
            )
            return facts, package.modules.get(name, package.module)
        except PackageNotFoundError:
            continue
        except BROKEN as error:
            return PackageFacts(dist=name, import_error=f"it can't be recognised: {cause_of(error)}"), None
    return None


def _owns(dist: "Distribution", file: str) -> bool:
    """Whether a distribution brought a file, by its own list or, where that can't tell, by where it lies."""
    project = _editable_project(dist)
    if project is not None:
        return any((project / top / file).exists() for top in ("", "src", "python"))
    if dist.files is None:
        return Path(str(dist.locate_file(file))).exists()
    return any(str(path) == file for path in dist.files)


def _editable_project(dist: "Distribution") -> Path | None:
    """The folder of a distribution that was installed in place, whose list of files names none of its modules."""
    from urllib.parse import urlparse
    from urllib.request import url2pathname

    text = dist.read_text("direct_url.json")
    origin: dict[str, Any] = {} if text is None else json.loads(text)
    if not origin.get("dir_info", {}).get("editable", False):
        return None
    return Path(url2pathname(urlparse(origin["url"]).path))


def _overwritten(dist: "Distribution", file: str) -> str | None:
    """Which other distribution has put its own file over this one's, if any; both list it then.

    A file that a person has changed matches nobody's list, and is left to them.
    """
    listed = next((path for path in dist.files or () if str(path) == file), None)
    if listed is None or listed.hash is None:
        return None
    found = _hash(Path(str(dist.locate_file(file))), listed.hash.mode)
    if found is None or found == listed.hash.value:
        return None
    from importlib.metadata import distributions

    for other in distributions():
        if any(str(path) == file and path.hash is not None and path.hash.value == found for path in other.files or ()):
            return (
                f"{other.name} {other.version} has overwritten its {file}; "
                f"install {dist.name} {dist.version} again, after the other"
            )
    return None


def _hash(path: Path, mode: str) -> str | None:
    """A file's hash as a list of installed files writes it, or None where there is no such file or hash."""
    import base64
    import hashlib

    if mode not in hashlib.algorithms_available or not path.is_file():
        return None
    return base64.urlsafe_b64encode(hashlib.new(mode, path.read_bytes()).digest()).rstrip(b"=").decode()


def _missing_module(package: Package) -> str | None:
    """In words, the first module that a package needs and that can't be found."""
    from importlib.util import find_spec

    for name in package.needs:
        try:
            spec = find_spec(name)
        except BROKEN as error:
            return f"the module {name}, which it needs, can't be looked for: {cause_of(error)}"
        if spec is None or spec.loader is None:  # a folder that only has the name is found too, without a loader
            return f"the module {name}, which it needs, isn't installed"
    return None


class _Import:
    """A subprocess that imports one package's entry point, with this interpreter and this sys.path."""

    def __init__(self, package: Package, module: str) -> None:
        import subprocess  # like importlib.metadata, more than a declaration should cost

        self._process: subprocess.Popen[bytes] | None = None
        self._failure: str | None = None
        asked = [module, package.function, package.flag, package.flag_reason]
        paths = [path for path in sys.path if isinstance(path, str)]
        try:
            # A session of its own, so that what the package starts (compilers, say) ends with it.
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), json.dumps(asked), *paths],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BROKEN as error:
            self._failure = f"no process could be started to import it: {cause_of(error)}"

    def answer(self, deadline: float, timeout_s: float) -> dict[str, Any]:
        """What was found: `parameters`, or an `import_error` in words."""
        import subprocess

        if self._process is None:
            return {"import_error": self._failure}
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"import_error": f"importing it took longer than {timeout_s:g} s"}
        text = self._written()
        if text:
            answer: dict[str, Any] = json.loads(text)
            parameters = answer.pop("parameters", None)
            return {**answer, "parameters": None if parameters is None else tuple(parameters)}
        return {"import_error": f"importing it {_how_it_ended(status)}"}

    def _written(self) -> bytes:
        """What the process has written. What it started may still hold the pipe open: nothing waits for its end."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        os.set_blocking(descriptor, False)
        try:
            return os.read(descriptor, MOST_BYTES)
        except BlockingIOError:
            return b""

    def end(self) -> None:
        """End the process, if it still runs, and what it has started."""
        if self._process is None:
            return
        if self._process.poll() is None:
            import signal

            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _how_it_ended(status: int) -> str:
    """How a process without an answer ended, as in "died with SIGSEGV"."""
    import signal

    if status >= 0:
        return f"ended the process with exit status {status}"
    try:
        return f"died with {signal.Signals(-status).name}"
    except ValueError:
        return f"died with signal {-status}"
