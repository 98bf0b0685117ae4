"""Scores for what a model made: functions, services elsewhere, or models of their own."""

from .reward import Reward, Sample

__all__ = ["Reward", "Sample"]
