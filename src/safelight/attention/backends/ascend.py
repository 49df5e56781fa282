"""ascend: the fused inference attention of Huawei's Ascend, through torch_npu."""

from safelight.attention.backend import AttentionBackend, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts
from safelight.platforms.packages import Package

MOST_HEADS = 256
MOST_GROUPED = 64


def takes(head_dim: int) -> bool:
    """Up to 512, in multiples of 16: what is between is padded."""
    return head_dim <= 512


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """The operator's limits on heads, and its one way to say lengths."""
    reasons = []
    if requirements.num_heads > MOST_HEADS:
        reasons.append(f"no {requirements.num_heads} heads (takes {MOST_HEADS})")
    if requirements.num_heads > MOST_GROUPED * requirements.num_kv_heads:
        reasons.append(
            f"no {requirements.num_heads} heads on {requirements.num_kv_heads} (takes {MOST_GROUPED} on each)"
        )
    if requirements.packed_varlen and requirements.mask != "none":
        reasons.append(f"no packed varlen together with mask {requirements.mask}")
    return tuple(Reason("capability", reason) for reason in reasons)


BACKEND = AttentionBackend(
    name="ascend",
    summary="Ascend's fused inference attention (torch_npu)",
    load=None,
    aliases=("ascend_fa", "ascend_attn", "ascend_flash_attn", "npu", "npu_fa", "_native_npu"),
    platforms=frozenset({"npu"}),
    arches={"npu": ("ascend910b", "ascend910c", "ascend950")},
    package=Package(
        key="torch_npu",
        dists=("torch-npu",),
        remedy="pip install torch-npu in the release of the installed torch, and source CANN's set_env.sh",
        module="torch_npu",
        function="npu_fused_infer_attention_score",
    ),
    head_dims=takes,
    head_dims_text="up to 512",
    # Its mask is one for all heads: neither dense nor bias.
    masks=frozenset({"none", "key_padding"}),
    packed_varlen=True,
    lse=True,
    why_not=why_not,
)
