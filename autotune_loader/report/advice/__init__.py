"""Which resource binds, how far its ceiling is, and what to do next: sentences from numbers.

evidence   what a verdict rests on, and the figures drawn from it
verdict    which resource binds the best configuration
steps      what to do about it, each with its measured reason
"""

from autotune_loader.report.advice.evidence import Evidence
from autotune_loader.report.advice.steps import advise
from autotune_loader.report.advice.verdict import judge

__all__ = ["Evidence", "advise", "judge"]
