"""Field cases about kernels' numbers, for every adapter that promises what they need."""

import pytest
import torch

from safelight.attention import AttentionRequirements, Layout
from safelight.attention.cases import DTYPES, HEAD_DIMS
from safelight.attention.contract import LOSSY_TOLERANCE, TOLERANCE
from safelight.attention.reference import reference_attention
from safelight.attention.select import why_not
from tests.contract.subjects import BACKENDS, SUBJECTS, facts

EACH = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.backend}-{subject.name}")


def layer(subject, **needs):
    """A layer in the widest dtype and a head_dim that the backend takes."""
    backend = BACKENDS[subject.backend]
    dtype = next(dtype for dtype in DTYPES[1:] if dtype in backend.dtypes)
    head_dim = next(size for size in (64, *HEAD_DIMS) if backend.head_dims is None or backend.head_dims(size))
    return AttentionRequirements(head_dim=head_dim, dtype=dtype, num_heads=4, num_kv_heads=4).replace(**needs)


def is_served(subject, need):
    return not why_not(subject.backend, need, facts(subject), BACKENDS, is_explicit=True, runs_here=True)


def draw(need, batch, tokens, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, heads, need.head_dim, generator=generator).to(getattr(torch, need.dtype))


def assert_equal(out, truth, need, subject):
    assert not out.isnan().any()
    if BACKENDS[subject.backend].is_lossy:
        assert (out.float() - truth).norm() <= LOSSY_TOLERANCE * truth.norm()
    else:
        assert (out.float() - truth).abs().max() <= TOLERANCE[need.dtype]


@EACH
def test_dx_029_padded_text_under_cross_attention(subject) -> None:
    """300 queries on 20 keys, of which a row of the batch has 7: as a mask, or packed, or refused."""
    masked = layer(subject, role="cross", mask="key_padding")
    packed = layer(subject, role="cross", packed_varlen=True)
    q, k, v = (draw(masked, 2, tokens, 4, seed) for tokens, seed in ((300, 1), (20, 2), (20, 3)))
    mask = torch.arange(20) < torch.tensor([[20], [7]])
    truth, _ = reference_attention(q, k, v, mask=mask)
    if is_served(subject, masked):
        with subject.installed():
            out = BACKENDS[subject.backend].load(masked)(q, k, v, mask=mask)
        assert_equal(out, truth, masked, subject)
        assert out.abs().amax((2, 3)).min() > 0, "a row of queries is zero"
    if is_served(subject, packed):
        layout = Layout.of_documents((300, 300), (20, 7))
        rows = (q.reshape(1, 600, 4, -1), *(torch.cat((x[:1], x[1:, :7]), dim=1) for x in (k, v)))
        with subject.installed():
            out = BACKENDS[subject.backend].load(packed)(*rows, layout=layout)
        assert_equal(out.reshape(q.shape), truth, packed, subject)
        assert out.abs().amax((2, 3)).min() > 0, "a row of queries is zero"


@EACH
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 1), (8, 8)])
def test_dx_055_each_head_reads_its_own_keys_and_values(subject, heads, kv_heads) -> None:
    """Values of kv head i are i + 1: output head h is h // (heads / kv_heads) + 1."""
    need = layer(subject, num_heads=heads, num_kv_heads=kv_heads)
    if not is_served(subject, need):
        refused = why_not(subject.backend, need, facts(subject), BACKENDS, is_explicit=True, runs_here=True)
        assert any("grouped-query" in reason.detail for reason in refused)
        return
    q, k = draw(need, 2, 9, heads, 1), draw(need, 2, 9, kv_heads, 2)
    v = (torch.arange(kv_heads, dtype=q.dtype) + 1)[:, None].expand(2, 9, kv_heads, need.head_dim).contiguous()
    with subject.installed():
        out = BACKENDS[subject.backend].load(need)(q, k, v).float()
    expected = torch.arange(heads) // (heads // kv_heads) + 1
    # Other heads are 1 or more away; 8 bits round 7 by up to 0.2.
    assert (out - expected[:, None]).abs().max() < 0.4


@EACH
def test_dx_055_heads_that_do_not_divide_are_refused(subject) -> None:
    need = layer(subject, num_heads=8, num_kv_heads=3)
    refused = why_not(subject.backend, need, facts(subject), BACKENDS, is_explicit=True, runs_here=True)
    assert [reason.kind for reason in refused][:1] == ["capability"]
    assert any("8 heads" in reason.detail and "3" in reason.detail for reason in refused)


@EACH
@pytest.mark.parametrize("form", ["all True", "additive zeros"])
def test_dx_089_a_mask_that_hides_nothing_changes_nothing(subject, form) -> None:
    """Where a mask is taken; an additive one is never read as one of booleans, whose zeros would hide every key."""
    need = layer(subject, mask="dense" if form == "all True" else "bias")
    if not is_served(subject, need):
        return
    q, k, v = (draw(need, 2, 9, 4, seed) for seed in (1, 2, 3))
    mask = torch.ones(2, 4, 9, 9, dtype=torch.bool) if form == "all True" else torch.zeros(2, 4, 9, 9, dtype=q.dtype)
    with subject.installed():
        out = BACKENDS[subject.backend].load(need)(q, k, v, mask=mask)
    assert_equal(out, reference_attention(q, k, v)[0], need, subject)
