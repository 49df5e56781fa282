"""Importing attention packages in subprocesses: what is found out, and every known way in which it goes wrong."""

import os
import subprocess
import sys
import time

import pytest

from safelight.platforms import PackageFacts
from tests.unit.fake_packages import CODE, ENTRY, PARAMETERS, only, package, probe, site
from tests.unit.site_packages import install

__all__ = ["site"]


def error_of(site, code, **options):
    """What is said of a package whose module holds this code; None if it serves."""
    install(site, "acme-kernels", files={"acme.py": code})
    facts = only(package(**ENTRY), **options)
    assert facts.parameters == (PARAMETERS if facts.import_error is None else None)
    return facts.import_error


# What the subprocess finds


def test_an_operator_in_c_tells_no_parameters_and_is_no_failure(site):
    install(site, "acme-kernels", files={"acme.py": "attend = iter\n"})
    assert only(package(**ENTRY)) == PackageFacts(dist="acme-kernels", version="1.0")


def test_a_module_without_a_function_is_only_imported(site):
    install(site, "acme-kernels", files={"acme/__init__.py": "", "acme/ops.py": "raise OSError('no')"})
    assert only(package(module="acme")).import_error is None
    assert only(package(module="acme.ops")).import_error == "OSError: no"


def test_the_subprocess_has_this_interpreter_and_these_paths(site):
    code = (
        f"import sys\nassert sys.executable == {sys.executable!r}\nassert sys.path == {sys.path!r}, sys.path\n" + CODE
    )
    assert error_of(site, code) is None


def test_no_module_beside_the_program_hides_another(site):
    """Its folder holds a packages.py, a facts.py and the like."""
    assert error_of(site, "import facts\n" + CODE) == "ModuleNotFoundError: No module named 'facts'"
    install(site, "facts", files={"facts.py": ""})
    assert error_of(site, "import facts\n" + CODE) is None


# Output that isn't the answer

NOISE = (
    "import os, sys\n"
    'print(\'{"parameters": ["x"]}\')\n'
    "sys.stdout.write('out'); sys.stdout.flush(); sys.stderr.write('err'); sys.__stdout__.write('more')\n"
    "os.write(1, b'raw'); os.write(2, b'raw')\n"
    "os.system('echo from a child')\n"
) + CODE


def test_what_a_package_prints_is_not_its_answer_and_is_not_shown(site, capfd):
    install(site, "acme-kernels", files={"acme.py": NOISE})
    assert only(package(**ENTRY)).parameters == PARAMETERS
    assert capfd.readouterr() == ("", "")


def test_a_package_that_prints_more_than_a_pipe_holds_does_not_wait(site):
    assert error_of(site, "print('x' * 1_000_000, flush=True)\n" + CODE, timeout_s=30) is None


def test_a_package_that_asks_for_input_gets_none(site):
    """Not even where there is some for this process."""
    ours, (reading, writing) = os.dup(0), os.pipe()
    os.write(writing, b"yes\n")
    os.dup2(reading, 0)
    try:
        assert error_of(site, "input('continue? ')", timeout_s=30) == "EOFError: EOF when reading a line"
        assert os.read(reading, 10) == b"yes\n"
    finally:
        os.dup2(ours, 0)
        for descriptor in (ours, reading, writing):
            os.close(descriptor)


def test_a_process_that_a_package_leaves_behind_is_not_waited_for(site):
    code = f"import subprocess, sys\nsubprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(20)'])\n"
    fork = "import os, time\nif os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)\n"
    started = time.monotonic()
    assert error_of(site, code + CODE, timeout_s=60) is None
    assert error_of(site, fork + CODE, timeout_s=60) is None
    assert error_of(site, fork + "os.kill(os.getpid(), 11)") == "importing it died with SIGSEGV"
    assert time.monotonic() - started < 20


# DX-023: what is broken, and how


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "raise ImportError('undefined symbol: _ZN3c105ErrorC2\\nmore')",
            "ImportError: undefined symbol: _ZN3c105ErrorC2",
        ),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        ("raise RuntimeError('ROCm version file not found')", "RuntimeError: ROCm version file not found"),
        (
            "raise AttributeError(\"'NoneType' object has no attribute 'split'\")",
            "AttributeError: 'NoneType' object has",
        ),
        ("raise AssertionError('Torch not compiled with CUDA enabled')", "AssertionError: Torch not compiled"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise SystemExit('no GPU')", "SystemExit: no GPU"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import sys; sys.exit()", "SystemExit"),
        ("raise KeyError('ROCM_PATH')", "KeyError: 'ROCM_PATH'"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise MemoryError", "MemoryError"),
        ("class Own(BaseException): pass\nraise Own('its own')", "Own: its own"),
        ("raise RuntimeError('\\n\\n  second line first \\nthird')", "RuntimeError: second line first"),
        ("raise RuntimeError('\\ud800 half a character')", "RuntimeError: \\ud800 half a character"),
        ("def attend(:", "SyntaxError: invalid syntax"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("version = '2.8.0.post2'", "AttributeError: module 'acme' has no attribute 'attend'"),
        ("import os; os.kill(os.getpid(), 11)", "importing it died with SIGSEGV"),
        ("import os; os.kill(os.getpid(), 8)", "importing it died with SIGFPE"),
        ("import os; os.abort()", "importing it died with SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", "importing it died with SIGKILL"),
        ("import os; os._exit(0)", "importing it ended the process with exit status 0"),
        ("import os; os._exit(7)", "importing it ended the process with exit status 7"),
        ("import sys; sys.excepthook = None; raise OSError('the hook is gone')", "importing it ended the process with"),
    ],
)
def test_dx_023_a_broken_package_says_how(site, code, said):
    error = error_of(site, code)
    assert error.startswith(said)
    assert "\n" not in error


def test_dx_023_an_import_that_hangs_is_ended_with_what_it_started(site):
    pids = site / "pids"
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    started = time.monotonic()
    assert error_of(site, code, timeout_s=5) == "importing it took longer than 5 s"
    assert time.monotonic() - started < 60
    deadline = time.monotonic() + 30
    while any(is_running(int(pid)) for pid in pids.read_text(encoding="utf-8").split()):
        assert time.monotonic() < deadline, "what the import had started goes on"
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # one that nobody has asked about is over too
    except OSError:
        return False


def test_dx_023_one_limit_holds_for_all_and_a_hanging_one_takes_nothing_from_the_others(site):
    for name in ("one", "two", "three"):
        install(site, f"acme-{name}", files={f"{name}.py": "import time; time.sleep(600)"})
    install(site, "acme-kernels", files={"acme.py": CODE})
    hanging = [package(f"acme-{name}", key=name, module=name) for name in ("one", "two", "three")]
    started = time.monotonic()
    found = probe(*hanging, package(**ENTRY), timeout_s=8)
    assert time.monotonic() - started < 24
    assert {key: facts.import_error for key, facts in found.items()} == {
        "acme": None,
        **dict.fromkeys(("one", "two", "three"), "importing it took longer than 8 s"),
    }


def test_dx_023_every_package_s_failure_is_its_own(site):
    for name, code in (("one", "raise OSError('one')"), ("two", "import os; os.kill(os.getpid(), 11)"), ("acme", CODE)):
        install(site, f"acme-{name}", files={f"{name}.py": code})
    found = probe(*(package(f"acme-{name}", key=name, module=name) for name in ("one", "two", "acme")))
    assert {key: facts.import_error for key, facts in found.items()} == {
        "acme": None,
        "one": "OSError: one",
        "two": "importing it died with SIGSEGV",
    }


def test_an_interpreter_that_cannot_be_started_is_a_cause(site, monkeypatch):
    install(site, "acme-kernels", files={"acme.py": CODE})
    monkeypatch.setattr(sys, "executable", str(site / "nothing"))
    assert only(package(**ENTRY)).import_error.startswith("no process could be started to import it: FileNotFoundError")


def test_cancelling_ends_the_processes(site, monkeypatch):
    install(site, "acme-kernels", files={"acme.py": "import time; time.sleep(600)"})
    started = []

    class Cancelled(subprocess.Popen):
        def wait(self, timeout=None):
            started.append(self)
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Cancelled)
    with pytest.raises(KeyboardInterrupt):
        probe(package(**ENTRY))
    assert started[0].poll() == -9


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("READY = True", None),
        ("READY = False\nWHY = 'libze_loader.so.1: cannot open\\nmore'", "libze_loader.so.1: cannot open"),
        ("READY = False\nWHY = None", "acme.READY is False"),
        ("READY = None", "acme.READY is None"),
        ("", "acme.READY is missing"),
    ],
)
def test_a_module_that_imports_without_its_binary_says_so_by_a_flag(site, code, said):
    install(site, "acme-kernels", files={"acme.py": f"{code}\n{CODE}"})
    assert only(package(flag="READY", flag_reason="WHY", **ENTRY)).import_error == said
    if said is None or "READY" in said:
        assert only(package(flag="READY", **ENTRY)).import_error == said
