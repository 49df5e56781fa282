"""sdpa's LSE on CUDA and ROCm, by torch's efficient kernel, through a stand-in for that operator on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from safelight_stand_ins import StandIn
from safelight_stand_ins.maths import attend, refuse_unless
from torch import Tensor
from torch.nn.functional import pad

from safelight.attention.backends import sdpa
from safelight.attention.cases import cases
from safelight.attention.contract import judge
from safelight.attention.select import why_not
from safelight.platforms import load_machine
from tests.contract.subjects import BACKENDS

NAME = "_scaled_dot_product_efficient_attention"
H100 = load_machine("h100")


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    is_causal: bool,
    scale: float | None,
):
    """Heads first; wants 16 bytes of alignment; its LSE is padded to a multiple of 32; empty rows are undefined."""
    unit = 16 // query.element_size()
    for tensor in (query, key, value):
        refuse_unless(tensor.shape[-1] % unit == 0, "head_dim isn't aligned")
        refuse_unless(tensor.shape[1] == query.shape[1], "heads have to be equally many")
        refuse_unless(tensor.stride(-1) == 1, "the last dimension must be contiguous")
    queries, keys = query.shape[2], key.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril()[None, None] if is_causal else attn_bias
    if attn_bias is not None:
        refuse_unless(attn_bias.dtype == query.dtype and attn_bias.shape == (*query.shape[:3], keys), "bias")
        refuse_unless(attn_bias.stride(-2) % unit == 0, "the rows of the bias aren't aligned")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, lse = attend(*(x.transpose(1, 2) for x in (query, key, value)), scale=scale, mask=mask, empty_lse=torch.nan)
    out = out.masked_fill(lse.isnan().transpose(1, 2)[..., None], torch.nan).transpose(1, 2)
    lse = pad(lse, (0, -queries % 32), value=1e30) if compute_log_sumexp else lse[..., :0]
    none = torch.zeros((), dtype=torch.int64)
    return out.contiguous(), lse, none, none


STAND_IN = StandIn(
    name="efficient",
    backend="sdpa",
    machine="h100",
    modules=lambda recorder: {},
    packages={},
    operators=lambda recorder: {NAME: recorder.function(f"torch:aten.{NAME}.default", efficient)},
)


def promised():
    for dtype in ("float32", "bfloat16"):
        for case in cases(BACKENDS["sdpa"], (dtype,)):
            if case.requirements.needs_lse and not why_not("sdpa", case.requirements, H100, BACKENDS):
                yield pytest.param(case, id=case.name)


@pytest.mark.parametrize("case", list(promised()))
def test_lse_from_the_efficient_kernel(case, monkeypatch) -> None:
    # The adapter asks the device which kernel it is; here both are the CPU's.
    monkeypatch.setattr(sdpa, "_flash_on_cpu", sdpa._efficient)
    with STAND_IN.installed() as calls:
        finding = judge(BACKENDS["sdpa"].load(case.requirements), case)
    assert finding.problem is None, finding.problem
    assert calls or 0 in (case.queries, case.keys)


def test_float64_has_no_lse_there() -> None:
    need = SimpleNamespace(needs_lse=True, dtype="float64", packed_varlen=False, mask="none")
    assert [reason.detail for reason in sdpa.why_not(need, H100)] == ["no LSE in float64 on cuda (on cpu alone)"]
