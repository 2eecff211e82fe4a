"""What figures of a run mean: what limits it, and what to do. Pure: records go in, findings come out.

units.py     numbers for people
tables.py    every sentence that can be said
evidence.py  what was measured of a loader in its loop
judge.py     what limits it, what to do about it, and both put into a result
"""

from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.diagnosis.judge import diagnose, judged
from autotune_loader.diagnosis.tables import Advice, Answer, Bottleneck, Caution, Ended, Kept, Source, Undecided
from autotune_loader.results.record import Finding

__all__ = [
    "Advice",
    "Answer",
    "Bottleneck",
    "Caution",
    "Ended",
    "Evidence",
    "Finding",
    "Kept",
    "Source",
    "Undecided",
    "diagnose",
    "judged",
]
