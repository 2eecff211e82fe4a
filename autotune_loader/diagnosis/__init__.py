"""What figures of a run mean: who is fastest, what limits it, what to do. Pure: records go in, findings come out.

evidence     what was measured of a loader in its loop
bottleneck   what limits it
judge        what to do about it, and both put into a result
ranking      every configuration once, with the best evidence there is of it
tables       every sentence that can be said      units     numbers for people
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
