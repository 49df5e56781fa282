"""What the Attention layer costs over torch's function with hand-written transposes, on the CPU.

    python benchmarks/attention_layer.py [--heads 12] [--head-dim 128] [--runs 20] [--json]

Both are called in turn, so that a busy machine slows both; what is told is the median of the runs' ratios, and of the
microseconds that the layer takes more.
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from safelight.attention import AttentionRequirements, declared_backends
from safelight.attention.layer import Attention

# Tokens, and calls in each run: about as much time for each.
SIZES = ((64, 400), (512, 20), (4096, 1))


def layer_with_sdpa(heads, head_dim):
    requirements = AttentionRequirements(
        head_dim=head_dim, dtype="float32", num_heads=heads, num_kv_heads=heads, equal_lengths=True
    )
    layer = Attention(requirements)
    layer.backend = declared_backends()["sdpa"]
    layer.kernel = layer.backend.load(requirements)
    return layer


def by_hand(q, k, v):
    return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def seconds(call, qkv, calls):
    started_s = time.perf_counter()
    for _ in range(calls):
        call(*qkv)
    return (time.perf_counter() - started_s) / calls


def measure(tokens, calls, *, heads, head_dim, runs):
    """Median seconds by hand, and the layer's: the median ratio to it, and how many seconds more."""
    layer = layer_with_sdpa(heads, head_dim)
    qkv = [torch.randn(1, tokens, heads, head_dim) for _ in range(3)]
    assert torch.equal(layer(*qkv), by_hand(*qkv))
    pairs = [(seconds(by_hand, qkv, calls), seconds(layer, qkv, calls)) for _ in range(runs)]
    return {
        "tokens": tokens,
        "by_hand_s": statistics.median(hand for hand, _ in pairs),
        "ratio": statistics.median(ours / hand for hand, ours in pairs),
        "more_s": statistics.median(ours - hand for hand, ours in pairs),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [
            measure(tokens, calls, heads=given.heads, head_dim=given.head_dim, runs=given.runs)
            for tokens, calls in SIZES
        ]
    if given.json:
        print(json.dumps({"torch": torch.__version__, "heads": given.heads, "head_dim": given.head_dim, "rows": rows}))
        return
    for row in rows:
        by_hand_us, more_us = row["by_hand_s"] * 1e6, row["more_s"] * 1e6
        ratio = f"the layer {row['ratio']:.3f} of it, {more_us:.1f} us more"
        print(f"{row['tokens']:5} tokens: {by_hand_us:10.1f} us by hand, {ratio}")


if __name__ == "__main__":
    main()
