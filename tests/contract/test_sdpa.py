"""The sdpa backend against reference.py beyond the common cases: combinations, and what equals what by itself.

Shapes: B batch, S queries, T keys, H heads, K key/value heads, D head_dim.
"""

import itertools

import pytest
import torch

from safelight.attention import AttentionRequirements
from safelight.attention.backends.sdpa import BACKEND
from safelight.attention.reference import reference_attention

# Largest absolute error allowed, on standard normal inputs (outputs are below about 3). float32 is two roundings of
# sums in another order; bfloat16 and float16 have 8 and 11 bits, and the reference gets the same rounded inputs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = tuple(TOLERANCE)
NO = -torch.inf


def kernel(num_heads=2, num_kv_heads=None, head_dim=32, dtype=torch.float32):
    need = AttentionRequirements(
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
    )
    assert need.dtype in BACKEND.dtypes
    return BACKEND.load(need)


def qkv(queries, keys, *, batch=1, heads=2, kv_heads=None, head_dim=32, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(length, count):
        return torch.randn(batch, length, count, head_dim, generator=generator, dtype=torch.float64).to(dtype)

    return draw(queries, heads), draw(keys, kv_heads or heads), draw(keys, kv_heads or heads)


def check(q, k, v, **options):
    """Both results, after comparing them; the inputs must come out unchanged."""
    given = [tensor.clone() for tensor in (q, k, v)]
    mask = options.get("mask")
    given_mask = None if mask is None else mask.clone()
    out = kernel(q.shape[2], k.shape[2], q.shape[3], q.dtype)(q, k, v, **options)
    expected, _ = reference_attention(q, k, v, **options)
    assert out.dtype == q.dtype and out.shape == q.shape
    assert not out.isnan().any()
    assert (out.to(expected.dtype) - expected).abs().max() <= TOLERANCE[q.dtype]
    assert all(torch.equal(tensor, before) for tensor, before in zip((q, k, v), given, strict=True))
    assert mask is None or torch.equal(mask, given_mask)
    return out


def lengths(batch, keys, *counts):
    """A key-padding mask with this many true keys in each row."""
    assert len(counts) == batch
    return torch.arange(keys)[None] < torch.tensor(counts)[:, None]


def masks(batch, heads, queries, keys):
    """One mask of every kind and broadcast form; no row is empty."""
    generator = torch.Generator().manual_seed(1)

    def dense(*shape):
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[..., 0] = True
        return mask

    def bias(*shape):
        return torch.randn(shape, generator=generator) * 2

    return {
        "key_padding": lengths(batch, keys, *(max(1, keys - 3 * i) for i in range(batch))),
        "dense": dense(batch, heads, queries, keys),
        "dense for all heads": dense(batch, 1, queries, keys),
        "dense for all rows": dense(1, 1, queries, keys),
        "bias": bias(batch, heads, queries, keys),
        "bias for all rows": bias(1, heads, queries, keys),
        "bias of keys": bias(batch, 1, 1, keys),
        "bias with -inf": bias(batch, heads, queries, keys).masked_fill(~dense(batch, heads, queries, keys), NO),
    }


MASKS = tuple(masks(1, 1, 1, 1))


def test_the_reference_is_the_definition() -> None:
    """Two keys, one head, by hand: scores 0 and ln 3, so the weights are 1/4 and 3/4."""
    q = torch.tensor([[[[1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[0.0]], [[1.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[8.0]], [[4.0]]]], dtype=torch.float64)
    ln3 = torch.tensor(3.0, dtype=torch.float64).log()
    out, lse = reference_attention(q, k, v, scale=float(ln3))
    assert torch.allclose(out, torch.tensor(5.0, dtype=torch.float64))
    assert torch.allclose(lse, torch.tensor(4.0, dtype=torch.float64).log())


def test_the_reference_of_an_empty_row_is_zero_and_minus_infinity() -> None:
    q, k, v = qkv(3, 5, batch=2)
    for mask in (lengths(2, 5, 0, 5), torch.zeros(2, 1, 1, 5).masked_fill(~lengths(2, 5, 0, 5)[:, None, None], NO)):
        out, lse = reference_attention(q, k, v, mask=mask)
        assert torch.equal(out[0], torch.zeros_like(out[0])) and (lse[0] == NO).all()
        assert out[1].abs().min() > 0 and lse[1].isfinite().all()


# Dtypes, scale, heads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 72])
def test_dtypes(dtype, head_dim) -> None:
    check(*qkv(33, 65, batch=3, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["key_padding", "dense", "bias", "bias with -inf"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_in_every_dtype(dtype, mask, causal) -> None:
    q, k, v = qkv(9, 17, batch=3, dtype=dtype)
    given = masks(3, 2, 9, 17)[mask]
    # A bias is given in the dtype of the layer: rounding it is the layer's business, not the kernel's.
    check(q, k, v, mask=given.to(dtype) if given.is_floating_point() else given, causal=causal)


@pytest.mark.parametrize("scale", [None, 1.0, 0.01, 32**-0.5])
@pytest.mark.parametrize("mask", [None, "key_padding", "bias"])
def test_the_scale_reaches_the_kernel(scale, mask) -> None:
    q, k, v = qkv(8, 12)
    given = None if mask is None else masks(1, 2, 8, 12)[mask]
    out = check(q, k, v, scale=scale, mask=given)
    if scale in (1.0, 0.01):
        assert (out - check(q, k, v, mask=given)).abs().max() > 0.01, "the scale makes a difference here"


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("mask", [None, "key_padding", "dense", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_query(heads, kv_heads, mask, causal) -> None:
    q, k, v = qkv(7, 7, batch=2, heads=heads, kv_heads=kv_heads)
    out = check(q, k, v, mask=None if mask is None else masks(2, heads, 7, 7)[mask], causal=causal)
    # Neighbouring heads share their keys and values: not each kv_heads-th one.
    repeated = [tensor.repeat_interleave(heads // kv_heads, dim=2) for tensor in (k, v)]
    same = kernel(heads)(q, *repeated, mask=None if mask is None else masks(2, heads, 7, 7)[mask], causal=causal)
    assert torch.allclose(out, same, atol=1e-6)


# Lengths


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 127, 128, 129, 193])
@pytest.mark.parametrize("queries", [1, 7, 64, 130])
@pytest.mark.parametrize("mask", [None, "key_padding", "bias"])
def test_dx_031_any_length_and_no_weight_on_padding(keys, queries, mask) -> None:
    """Keys point away from the queries, so that a key of zeros, as padding would be, gets all the weight."""
    q, k, v = qkv(queries, keys, batch=2)
    q, k = q.abs(), -k.abs() * 4
    given = None if mask is None else masks(2, 2, queries, keys)[mask]
    out = check(q, k, v, mask=given)
    assert out.abs().amax((2, 3)).min() > 0.05, "some row is (nearly) zero"


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 8), (8, 3), (1, 65), (65, 1), (63, 129), (129, 63)])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_causal_is_aligned_at_the_bottom_right(queries, keys, mask) -> None:
    q, k, v = qkv(queries, keys, batch=2)
    out = check(q, k, v, causal=True, mask=None if mask is None else masks(2, 2, queries, keys)[mask])
    if mask is None:
        # The last query sees every key, the first as many as are left to it.
        assert torch.allclose(out[:, -1:], check(q[:, -1:], k, v), atol=1e-6)
        first = max(0, keys - queries + 1)
        assert torch.allclose(out[:, :1], check(q[:, :1], k[:, :first], v[:, :first]), atol=1e-6)


def test_causal_queries_before_the_first_key_are_zero() -> None:
    out = check(*qkv(8, 3), causal=True)
    assert torch.equal(out[:, :5], torch.zeros_like(out[:, :5]))
    assert out[:, 5:].abs().amax((2, 3)).min() > 0


def test_no_keys_at_all_give_zeros() -> None:
    assert torch.equal(check(*qkv(3, 0)), torch.zeros(1, 3, 2, 32))


# Masks


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (5, 9), (64, 65)])
def test_masks(mask, queries, keys) -> None:
    q, k, v = qkv(queries, keys, batch=3)
    given = masks(3, 2, queries, keys)[mask]
    out = check(q, k, v, mask=given)
    assert (out - check(q, k, v)).abs().max() > 0.01, "the mask makes a difference"


def test_masks_combine_with_everything_else() -> None:
    options = itertools.product(MASKS, (False, True), (None, 0.3), (None, 2))
    for mask, causal, scale, kv_heads in options:
        q, k, v = qkv(5, 7, batch=2, heads=4, kv_heads=kv_heads)
        check(q, k, v, mask=masks(2, 4, 5, 7)[mask], causal=causal, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["key_padding", "dense", "bias"])
def test_a_row_with_nothing_to_attend_to_is_zero(dtype, causal, form) -> None:
    q, k, v = qkv(9, 9, batch=3, dtype=dtype)
    padding = lengths(3, 9, 9, 0, 5)
    mask = padding if form == "key_padding" else padding[:, None, None].expand(3, 2, 9, 9).clone()
    if form != "key_padding":
        mask[0, 1, 4] = False
    if form == "bias":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, NO)
    out = check(q, k, v, mask=mask, causal=causal)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[2].abs().amax((1, 2)).min() > 0
    if form != "key_padding":
        assert torch.equal(out[0, 4, 1], torch.zeros_like(out[0, 4, 1]))
        assert out[0, 4, 0].abs().max() > 0


@pytest.mark.parametrize("form", ["key_padding", "bias"])
def test_dx_029_padded_text_under_cross_attention(form) -> None:
    q, k, v = qkv(300, 20, batch=2, heads=4)
    mask = lengths(2, 20, 20, 7)
    if form == "bias":
        mask = torch.zeros(2, 1, 1, 20).masked_fill(~mask[:, None, None], NO)
    out = check(q, k, v, mask=mask)
    assert out.abs().amax((2, 3)).min() > 0, "a query row is zero"
    # Each row of the batch is what it is alone, on its own keys.
    for row, count in ((0, 20), (1, 7)):
        alone = check(q[row : row + 1], k[row : row + 1, :count], v[row : row + 1, :count])
        assert torch.allclose(out[row], alone[0], atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_masked_has_no_influence(causal) -> None:
    q, k, v = qkv(9, 9, batch=2)
    mask = lengths(2, 9, 4, 6)
    out = check(q, k, v, mask=mask, causal=causal)
    hidden = ~mask[:, :, None, None]
    moved = check(q, k + 50 * hidden, v - 70 * hidden, mask=mask, causal=causal)
    assert torch.equal(out, moved)


def test_a_bias_in_float32_serves_a_narrower_layer() -> None:
    q, k, v = qkv(6, 9, batch=2, dtype=torch.bfloat16)
    bias = masks(2, 2, 6, 9)["bias with -inf"]
    check(q, k, v, mask=bias.to(torch.bfloat16).float())


# Memory


def strided(tensor, form):
    """The same values in another memory layout."""
    if form == "heads first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "part of fused projections":
        return torch.stack((tensor, tensor + 1, tensor - 1), dim=2)[:, :, 0]
    if form == "every other token":
        return tensor.repeat_interleave(2, dim=1)[:, ::2]
    assert form == "features last but one"
    return tensor.mT.contiguous().mT


FORMS = ("heads first", "part of fused projections", "every other token", "features last but one")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", [None, "key_padding", "dense", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_inputs_need_not_be_contiguous(form, mask, causal) -> None:
    q, k, v = qkv(7, 9, batch=3)
    given = None if mask is None else masks(3, 2, 7, 9)[mask]
    out = check(q, k, v, mask=given, causal=causal)
    inputs = [strided(tensor, form) for tensor in (q, k, v)]
    assert not any(tensor.is_contiguous() for tensor in inputs)
    assert torch.allclose(check(*inputs, mask=given, causal=causal), out, atol=1e-6)


def test_one_row_may_serve_a_whole_batch() -> None:
    q, k, v = qkv(4, 6, batch=3)
    shared = k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)
    out = check(q, *shared, mask=lengths(1, 6, 4).expand(3, -1))
    alone = check(q[2:], k[:1], v[:1], mask=lengths(1, 6, 4))
    assert torch.allclose(out[2:], alone, atol=1e-6)


@pytest.mark.device
@pytest.mark.parametrize("form", ["key_padding", "dense", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_empty_row_is_zero_on_a_device(form, dtype) -> None:
    device = torch.accelerator.current_accelerator()
    q, k, v = (tensor.to(device) for tensor in qkv(64, 64, batch=2, head_dim=64, dtype=dtype))
    mask = lengths(2, 64, 0, 33)
    if form != "key_padding":
        mask = mask[:, None, None].expand(2, 2, 64, 64)
    if form == "bias":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, NO)
    out = kernel(head_dim=64, dtype=dtype)(q, k, v, mask=mask.to(device)).cpu()
    expected, _ = reference_attention(q.cpu(), k.cpu(), v.cpu(), mask=mask)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert (out.float() - expected).abs().max() <= max(TOLERANCE[dtype], 1e-3)
