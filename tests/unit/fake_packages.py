"""Made-up attention packages: how tests declare one, ask about it, and keep it from being imported here."""

import sys

import pytest

from safelight.platforms.packages import Package, probe_packages


def package(name="acme-kernels", **fields):
    return Package(**{"key": "acme", "dists": (name,), "remedy": f"pip install {name}", **fields})


ENTRY = {"module": "acme", "function": "attend"}
CODE = "def attend(q, k, v, *, scale=None, **more):\n    return q\n"
PARAMETERS = ("q", "k", "v", "scale", "more")


def probe(*packages, env=None, **options):
    return probe_packages(packages, env or {}, **options)


def only(*packages, **options):
    (facts,) = probe(*packages, **options).values()
    return facts


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of modules that comes first, here and in subprocesses, and of which nothing may be imported here."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    files = [str(getattr(module, "__file__", None)) for module in tuple(sys.modules.values())]
    assert [file for file in files if file.startswith(str(tmp_path))] == []
