"""Attention backend selection: requirements and machine facts in, a backend and its reasons out. Imports no torch."""

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout, Reason
from safelight.attention.plan import AttentionPlan, LayerGroup, PlannedLayer, build_plan
from safelight.attention.requirements import AttentionRequirements
from safelight.attention.scope import forced_attention
from safelight.attention.select import BackendPreference, Selection, Verdict, declared_backends, select_backend

__all__ = [
    "AttentionBackend",
    "AttentionFn",
    "AttentionPlan",
    "AttentionRequirements",
    "BackendPreference",
    "LayerGroup",
    "Layout",
    "PlannedLayer",
    "Reason",
    "Selection",
    "Verdict",
    "build_plan",
    "declared_backends",
    "forced_attention",
    "select_backend",
]
