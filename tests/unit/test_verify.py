"""Verification: a kernel that raises, dies or prints is one backend's finding, and what was asked is all that runs."""

import dataclasses
import sys
import time

import pytest
import torch

from safelight.attention import declared_backends
from safelight.attention.select import why_not
from safelight.attention.verify import Answer, Verification, cases_here, dtypes_of, verify, verify_here
from safelight.platforms import load_machine
from tests.unit.site_packages import install

MACHINE = load_machine("cpu-avx2")
SDPA = declared_backends()["sdpa"]
HALF = dataclasses.replace(SDPA, name="half", aliases=(), dtypes=frozenset({"float16"}))
# Few cases: every case that one of these has is plain, or refused.
KERNELS = """
import dataclasses, os, signal, time
from safelight.attention.backends.sdpa import BACKEND as SDPA


def dies_with(ending):
    def load(requirements):
        kernel = SDPA.load(requirements)

        def dying(q, k, v, **options):
            print("a library's own words", flush=True)
            os.system("echo and those of its children")
            if q.shape[1] == 1111:
                ending()
            return kernel(q, k, v, **options)

        return dying

    return load


def declare(name, ending):
    plain = {"masks": frozenset({"none"}), "grouped_query": False, "causal": False, "lse": False}
    return dataclasses.replace(
        SDPA, name=name, aliases=(), load=dies_with(ending), cross_lengths=False, packed_varlen=False, **plain
    )


KILLED = declare("killed", lambda: os.kill(os.getpid(), signal.SIGSEGV))
GONE = declare("gone", lambda: os._exit(0))
GOOD = declare("good", lambda: None)
HANGS = declare("hangs", lambda: time.sleep(600))
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """The declared backends, with those of a package that was installed for this test."""
    names = ("KILLED", "GONE", "GOOD", "HANGS")
    points = "[safelight.backends]\n" + "".join(f"{name.lower()} = kernels_that_end:{name}\n" for name in names)
    install(tmp_path, "ending-kernels", files={"kernels_that_end.py": KERNELS}, entry_points=points)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield declared_backends()
    del sys.modules["kernels_that_end"]


def few(backend=SDPA, count=3):
    return cases_here(backend, MACHINE, {backend.name: backend}, ("float32",))[:count]


def with_kernel(load):
    return dataclasses.replace(SDPA, load=load)


def test_the_cases_are_those_that_selection_allows() -> None:
    backends = declared_backends()
    found = cases_here(SDPA, MACHINE, backends, ("float32", "bfloat16"))
    assert {case.requirements.dtype for case in found} == {"float32", "bfloat16"}
    assert all(not why_not("sdpa", c.requirements, MACHINE, backends, is_explicit=True, runs_here=True) for c in found)
    assert cases_here(SDPA, MACHINE, backends, ()) == ()


def test_dtypes_are_the_usual_ones_that_are_declared_or_the_backend_s_own() -> None:
    assert dtypes_of(SDPA) == ("float32", "bfloat16")
    assert dtypes_of(SDPA, ("float16", "bfloat16")) == ("float16", "bfloat16")
    assert dtypes_of(HALF) == ("float16",)
    assert dtypes_of(HALF, ("bfloat16",)) == ()


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (
            RuntimeError("no kernel image is available\nsecond line"),
            "raised RuntimeError: no kernel image is available",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: OutOfMemoryError: CUDA out of memory"),
        (MemoryError(), "out of memory: MemoryError"),
        (SystemExit("no licence"), "raised SystemExit: no licence"),
    ],
)
def test_what_a_kernel_raises_is_its_answer_and_the_next_case_runs(error, problem) -> None:
    def load(requirements):
        def kernel(q, k, v, **options):
            if q.shape[0] == 3:
                raise error
            return SDPA.load(requirements)(q, k, v, **options)

        return kernel

    asked = few()
    answers = list(verify_here(with_kernel(load), asked, "cpu"))
    assert [answer.problem for answer in answers] == [problem if case.batch == 3 else None for case in asked]
    assert answers[0].problem == problem and answers[0].error is None
    assert 0 <= answers[-1].error <= answers[-1].tolerance


def test_a_kernel_that_can_not_be_loaded_says_so() -> None:
    def load(requirements):
        raise ImportError("libcudart.so.12: cannot open shared object file")

    (answer,) = verify_here(with_kernel(load), few(count=1), "cpu")
    assert answer.problem == "can't be loaded: ImportError: libcudart.so.12: cannot open shared object file"


def test_layers_with_equal_requirements_share_a_kernel() -> None:
    """One that compiles does it once for them."""
    loaded = []

    def load(requirements):
        loaded.append(requirements)
        return SDPA.load(requirements)

    asked = few(count=80)
    assert all(answer.problem is None for answer in verify_here(with_kernel(load), asked, "cpu"))
    assert len(loaded) == len(set(loaded)) == len({case.requirements for case in asked}) < len(asked)


def test_a_lossy_kernel_is_given_its_own_tolerance() -> None:
    def load(requirements):
        return lambda *qkv, **options: SDPA.load(requirements)(*qkv, **options) * 1.1

    exact, lossy = (
        next(iter(verify_here(dataclasses.replace(SDPA, load=load, is_lossy=is_lossy), few(count=1), "cpu")))
        for is_lossy in (False, True)
    )
    assert exact.problem is not None
    assert (lossy.problem, lossy.tolerance) == (None, 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "end"), [("killed", "the process died with SIGSEGV"), ("gone", "the process ended with exit status 0")]
)
def test_a_kernel_that_ends_its_process_fails_in_its_case_and_the_next_dtype_runs(kernels, name, end, capfd) -> None:
    told = []
    found = verify(
        kernels[name],
        MACHINE,
        kernels,
        dtypes=("float32", "bfloat16"),
        device="cpu",
        report=lambda done, total: told.append((done, total)),
    )
    asked = {dtype: cases_here(kernels[name], MACHINE, kernels, (dtype,)) for dtype in ("float32", "bfloat16")}
    assert found.end == end and not found.has_passed
    assert [(answer.case, answer.problem) for answer in found.failures] == [
        (f"a long odd length in {dtype}", end) for dtype in asked
    ]
    ran = {dtype: [answer.case for answer in found.answers if answer.dtype == dtype] for dtype in asked}
    assert all(names == [case.name for case in asked[dtype]][: len(names)] for dtype, names in ran.items())
    total = sum(map(len, asked.values()))
    assert found.num_cases == total and told[0] == (0, total) and told[-1][0] < total
    assert "a library's own words" not in capfd.readouterr().out


@pytest.mark.slow
def test_a_kernel_that_hangs_is_ended_and_fails_in_its_case(kernels) -> None:
    started_s = time.monotonic()
    found = verify(kernels["hangs"], MACHINE, kernels, dtypes=("float32",), device="cpu", case_s=20.0)
    assert time.monotonic() - started_s < 120
    assert found.end == "the process took longer than 20 s for it"
    assert [answer.case for answer in found.failures] == ["a long odd length in float32"]


@pytest.mark.slow
def test_what_a_library_prints_reaches_no_answer(kernels) -> None:
    found = verify(kernels["good"], MACHINE, kernels, dtypes=("float32",), device="cpu")
    assert found.has_passed and len(found.answers) == found.num_cases > 10


def test_no_case_is_no_process() -> None:
    found = verify(HALF, MACHINE, {"half": HALF}, dtypes=(), device="cpu")
    assert found == Verification(backend="half", num_cases=0, answers=())
    assert not found.has_passed, "nothing was shown"


def test_an_answer_survives_json() -> None:
    answer = Answer(case="plain", dtype="float32", error=None, tolerance=None, seconds=0.5, problem="raised")
    found = Verification(backend="sdpa", num_cases=2, answers=(answer,), end="the process died with SIGSEGV")
    data = found.to_json()
    assert Answer.from_json(data["cases"][0]) == answer
    assert (data["passed"], data["num_failures"], data["num_cases"]) == (False, 1, 2)
