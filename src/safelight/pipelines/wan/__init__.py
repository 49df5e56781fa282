"""Wan text-to-video: checkpoint.py reads a model's configurations, pipeline.py runs it."""

from safelight.pipelines import Family
from safelight.pipelines.wan.checkpoint import WanCheckpoint, layer_groups, lengths, resolve, sequences

FAMILY = Family(
    name="wan",
    class_name="WanPipeline",
    open=WanCheckpoint.open,
    layer_groups=layer_groups,
    resolve=resolve,
    lengths=lengths,
    sequences=sequences,
)
