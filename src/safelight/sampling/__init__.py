"""Schedules, solvers, guidance and noise: functions of tensors that never see a model."""
