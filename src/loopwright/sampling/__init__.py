"""Schedules, solvers and guidance: functions on arrays and tensors that know no engine and no model."""
