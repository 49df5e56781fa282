"""The contract can fail: adapters with a fault planted in their source, one at a time, turn it red."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from safelight.attention.backend import AttentionBackend
from safelight.attention.cases import cases
from safelight.attention.contract import judge
from tests.contract.subjects import SUBJECTS, refusals

SOURCES = Path(sys.modules["safelight.attention"].__path__[0])
SHARED = "safelight.attention.flash"


@dataclass(frozen=True)
class Fault:
    """What is wrong, in which adapter, and the change of its source: `old` occurs exactly once.

    With `is_shared` the source is that of the frame which it has in common with others.
    """

    what: str
    backend: str
    old: str
    new: str
    release: str = ""  # of the stand-in, where only one shows it
    is_shared: bool = False


FAULTS = (
    Fault("scale dropped", "sdpa", "scale=scale,\n            enable_gqa", "scale=None,\n            enable_gqa"),
    Fault("scale dropped", "flash2", '"softmax_scale": scale,', '"softmax_scale": None,', is_shared=True),
    Fault("mask ignored", "sdpa", "attn_mask=mask,", "attn_mask=None,"),
    Fault(
        "causal misaligned",
        "sdpa",
        "if causal and (mask is not None or q.shape[1] != k.shape[1]):",
        "if causal and mask is not None:",
    ),
    Fault("causal dropped", "flash3", '"causal": causal,', '"causal": False,', is_shared=True),
    Fault(
        "empty rows left as they are",
        "flash2",
        "clear_blind(out, lse,",
        "(lambda *_, **__: None)(out, lse,",
        is_shared=True,
    ),
    Fault(
        "varlen offsets off by one",
        "flash2",
        "cu_seqlens_q=layout.offsets,",
        "cu_seqlens_q=layout.offsets + 1,",
        is_shared=True,
    ),
    Fault(
        "varlen longest too short",
        "xpu_flash",
        "max_seqlen_k=longest_keys,",
        "max_seqlen_k=longest_keys - 1,",
        is_shared=True,
    ),
    Fault("strides not looked at", "flash2", "q, k, v = with_dense_features(q, k, v)\n", "pass\n", is_shared=True),
    Fault("strides not looked at", "mate", "k.contiguous()", "k"),
    Fault("LSE not asked for", "flash4", '{"return_lse": needs_lse}', '{"return_lse": False}'),
    Fault("rows of the batch as one document", "xpu_flash", "batch * keys + 1, keys,", "batch * keys + 1, keys - 1,"),
    Fault("scale dropped", "sage", "sm_scale=q.shape[-1] ** -0.5 if scale is None else scale,", "sm_scale=None,"),
    Fault("scale dropped", "ascend", "head_dim**-0.5 if scale is None else scale", "1.0"),
    Fault("scale dropped", "ascend_fusion", "scale=q.shape[-1] ** -0.5 if scale is None else scale,", ""),
    Fault(
        "padded head_dim changing the scale",
        "ascend",
        '"scale": head_dim**-0.5',
        '"scale": (head_dim + -head_dim % UNIT) ** -0.5',
    ),
    Fault("mask ignored", "cudnn", "attend(q, k, v, bias, needs_lse", "attend(q, k, v, None, needs_lse"),
    Fault("mask upside down", "ascend", "whole = (~hidden)", "whole = hidden"),
    Fault("causal misaligned", "cudnn", "causal and queries == keys and mask is None", "causal and mask is None"),
    Fault("kv heads repeated by tiling", "cudnn", "k.repeat_interleave(groups, dim=2)", "k.repeat(1, 1, groups, 1)"),
    Fault("strides not looked at", "cudnn", "x.transpose(1, 2).contiguous()", "x.transpose(1, 2)"),
    Fault("BHSD for BSHD", "ascend", "lse[..., 0].T.contiguous()[None]", "lse[..., 0].contiguous()[None]"),
    Fault("varlen offsets off by one", "ascend", "list(layout.key_starts[1:])", "list(layout.key_starts[:-1])"),
    Fault("LSE from the maximum alone", "ascend_fusion", " + total[..., 0].log()", ""),
    Fault("scale dropped", "flashinfer", "sm_scale=scale,", "sm_scale=None,"),
    Fault("mask ignored", "xformers", "attn_bias=bias,", "attn_bias=None,"),
    Fault("base-2 LSE unconverted", "flashinfer", "lse * math.log(2)", "lse", release="0.2.8"),
    Fault("base-2 LSE unconverted", "flashinfer", '{"lse_base": "ln"}', "{}", release="0.7.4"),
    Fault("BHSD for BSHD", "sage", 'tensor_layout="NHD"', 'tensor_layout="HND"'),
    Fault("BHSD for BSHD", "sage3", "(x.transpose(1, 2).contiguous() for x in (q, v))", "(q, v)"),
    Fault(
        "kv heads repeated by tiling",
        "xformers",
        "(x[:, :, :, None].expand(-1, -1, -1, per_group, -1) for x in (k, v))",
        "(x.repeat(1, 1, per_group, 1).unflatten(2, (groups, per_group)) for x in (k, v))",
    ),
    Fault("causal misaligned", "xformers", "elif mask is None and causal and queries == keys:", "elif causal:"),
    Fault(
        "varlen offsets off by one",
        "aiter",
        "cu_seqlens_k=layout.offsets if",
        "cu_seqlens_k=layout.offsets - 1 if",
        is_shared=True,
    ),
    Fault("padded LSE kept", "xformers", "[:, :, :queries].float()", ".float()"),
    Fault("K modified in place", "sage", "k.clone() if works_in_place else k", "k", release="1.0.6"),
    Fault("padded keys left in", "laser", "-k.shape[1] % BLOCK or NO_PADDING", "NO_PADDING"),
    Fault("padded head_dim changing the scale", "laser", "head_dim**-0.5", "HEAD_DIM**-0.5"),
    Fault("K modified in place", "sage3", ".clone(memory_format=torch.contiguous_format)", ".contiguous()"),
    Fault("descales dropped", "aiter_fp8", "(k_size / largest).reshape(1)", "(k_size / k_size).reshape(1)"),
    Fault("output scale dropped", "aiter_fp8", " * (v_size / largest)", ""),
    Fault("K modified in place", "sdpa", "out = scaled_dot", "k -= k.mean(1, keepdim=True)\n        out = scaled_dot"),
)


def faulty(fault: Fault, patch: pytest.MonkeyPatch) -> AttentionBackend:
    """The declaration whose adapter has the fault."""
    own = importlib.import_module(f"safelight.attention.backends.{fault.backend}")
    path = SOURCES / ("flash.py" if fault.is_shared else f"backends/{fault.backend}.py")
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{path.name} has {fault.old!r} {text.count(fault.old)} times, not once"
    module = ModuleType("faulty")
    exec(compile(text.replace(fault.old, fault.new), f"faulty {path.name}", "exec"), vars(module))
    if fault.is_shared:
        patch.setitem(sys.modules, SHARED, module)
    found: AttentionBackend = own.BACKEND if fault.is_shared else module.BACKEND
    return found


def red_cases(fault: Fault, patch: pytest.MonkeyPatch) -> list[str]:
    """The cases in which the faulty adapter is found out, each with how."""
    backend = faulty(fault, patch)
    found = []
    for subject in SUBJECTS:
        if subject.backend != fault.backend or fault.release not in subject.name:
            continue
        for case in cases(backend):
            if refusals(subject, case):
                continue
            with subject.installed():
                try:
                    problem = judge(backend.load(case.requirements), case, is_lossy=backend.is_lossy).problem
                except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                    problem = str(error)
            if problem is not None:
                found.append(f"{case.name}: {problem}")
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.backend}: {fault.what}")
def test_a_planted_fault_turns_the_contract_red(fault, monkeypatch) -> None:
    found = red_cases(fault, monkeypatch)
    print(*found, sep="\n")
    assert found


@pytest.mark.parametrize(
    "fault",
    [
        Fault("none", "flash2", '"return_attn_probs"', '"return_attn_probs"'),
        Fault("none", "flash2", "takes no mask", "takes no mask", is_shared=True),
    ],
)
def test_without_a_fault_nothing_is_red(fault, monkeypatch) -> None:
    assert red_cases(fault, monkeypatch) == []
