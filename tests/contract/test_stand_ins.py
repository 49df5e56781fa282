"""The stand-ins: they refuse what the vendor would refuse or swallow, leave no trace, and serve outside packages."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safelight_stand_ins import STAND_INS, NotRecorded, Recorder, signature_of
from safelight_stand_ins.recorded import RECORDS

DISTRIBUTION = Path(__file__).parents[1] / "stand_ins"
OUTSIDE = """
import torch
from safelight.attention.backends.flash2 import BACKEND
from safelight.attention.cases import cases
from safelight.attention.contract import judge
from safelight_stand_ins import STAND_INS

(flash2,) = (stand_in for stand_in in STAND_INS if stand_in.backend == "flash2")


def test_outside():
    case = next(case for case in cases(BACKEND) if case.requirements.needs_lse)
    with flash2.installed() as calls:
        assert judge(BACKEND.load(case.requirements), case).problem is None
    assert len(calls) == 1 and calls[0].arguments["return_attn_probs"] is True
"""


@pytest.mark.parametrize("record", sorted(RECORDS))
def test_every_record_is_a_signature(record) -> None:
    assert isinstance(signature_of(record), inspect.Signature)
    assert RECORDS[record]["version"] and RECORDS[record]["source"]


def test_a_swallowed_argument_is_refused() -> None:
    """SageAttention 1 takes attn_mask and return_lse in its **kwargs and does nothing with them."""
    recorder = Recorder()
    sage = recorder.function("sageattention==1.0.6:sageattn", lambda q, k, v: q)
    with pytest.raises(NotRecorded, match="swallows"):
        sage(1, 2, 3, return_lse=True)
    assert sage(1, 2, 3) == 1
    assert [call.function for call in recorder.calls] == ["sageattention==1.0.6:sageattn"]


def test_a_name_that_the_vendor_does_not_have_is_refused() -> None:
    flash = Recorder().function("flash-attn:flash_attn.flash_attn_func", lambda q, k, v: q)
    with pytest.raises(NotRecorded, match="scale"):
        flash(1, 2, 3, scale=0.5)
    with pytest.raises(NotRecorded, match="'v'"):
        flash(1, 2)


def test_an_argument_that_the_body_does_not_honour_is_refused() -> None:
    flash = Recorder().function("flash-attn:flash_attn.flash_attn_func", lambda q, k, v, causal: q)
    assert flash(1, 2, 3, causal=True, dropout_p=0.0) == 1
    with pytest.raises(NotRecorded, match=r"softcap=30\.0"):
        flash(1, 2, 3, softcap=30.0)


def test_a_body_can_not_ask_for_what_is_not_recorded() -> None:
    with pytest.raises(AssertionError, match="no parameter"):
        Recorder().function("flash-attn:flash_attn.flash_attn_func", lambda q, mask: q)


@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda stand_in: f"{stand_in.backend}-{stand_in.name}")
def test_nothing_is_left_behind(stand_in) -> None:
    before = dict(sys.modules)
    with stand_in.installed():
        pass
    assert {name for name in set(sys.modules) ^ set(before) if not name.startswith("torch")} == set()


def test_flash_attn_is_as_nasty_as_the_real_one() -> None:
    (stand_in,) = (one for one in STAND_INS if one.backend == "flash2")
    q = torch.randn(1, 4, 2, 64, dtype=torch.bfloat16)
    with stand_in.installed():
        from flash_attn import flash_attn_func

        out, lse, _ = flash_attn_func(q, q[:, :2], q[:, :2], causal=True, return_attn_probs=True)
        assert lse[:, :, :2].eq(torch.inf).all() and not out[:, :2].any()
        with pytest.raises(RuntimeError, match="fp16 and bf16"):
            flash_attn_func(q.float(), q.float(), q.float())
        with pytest.raises(RuntimeError, match="contiguous"):
            flash_attn_func(q.mT.contiguous().mT, q, q)


@pytest.mark.slow
def test_an_outside_package_uses_them_in_its_tests(tmp_path) -> None:
    """Installed from its folder, as `pip install` does from a repository's subdirectory."""
    command = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site"))
    subprocess.run([sys.executable, *command, str(DISTRIBUTION)], check=True, timeout=120)
    (tmp_path / "test_outside.py").write_text(OUTSIDE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_outside.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
