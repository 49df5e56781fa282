"""sliding_tile: each tile of a video's tokens attends to the tiles near it; sparse, in plain torch on any device."""

from safelight.attention.backend import AttentionBackend, Reason
from safelight.attention.requirements import AttentionRequirements
from safelight.platforms.facts import MachineFacts


def why_not(requirements: AttentionRequirements, machine: MachineFacts) -> tuple[Reason, ...]:
    """It needs to know where each token is in the video."""
    if requirements.is_auxiliary:
        return (Reason("capability", f"no token grid to make tiles of in {requirements.component}"),)
    return ()


BACKEND = AttentionBackend(
    name="sliding_tile",
    summary="sliding tile attention: the neighbourhood of each token in time and space, sparse",
    load=None,
    aliases=("sta", "st_attn", "sliding_tile_attn", "sliding_tile_attention"),
    dtypes=frozenset({"float16", "bfloat16", "float32"}),
    grouped_query=False,
    causal=False,
    cross_lengths=False,
    is_sparse=True,
    why_not=why_not,
)
