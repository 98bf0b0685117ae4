"""Scores for what a model made: functions, services elsewhere, or models of their own.

score = rewards.parse({"ocr": 1.0, "jpeg": -0.1})
score([Sample('the word "lamp"', frames)])      # [0.83], None for a sample that could not be scored
"""

from .choose import JUDGES, REWARDS, judges, parse
from .composite import Composite
from .reward import Reward, Sample

__all__ = ["JUDGES", "REWARDS", "Composite", "Reward", "Sample", "judges", "parse"]
