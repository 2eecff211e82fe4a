"""What figures of a run mean: what limits it, and what to do. Pure: records go in, findings come out.

messages.py  every sentence that can be said
evidence.py  what was measured of a loader in its loop
account.py   where each second of its loops went
causes.py    why it costs so much, and what to do about that
loops.py     all of this for the loops of a script
judge.py     what limits it, what to do about it, and both put into a result
"""

from autotune_loader.diagnosis.account import Account
from autotune_loader.diagnosis.causes import Job, NamedCause, slow_rank
from autotune_loader.diagnosis.evidence import Evidence
from autotune_loader.diagnosis.judge import diagnose, judged
from autotune_loader.diagnosis.loops import judge_loops
from autotune_loader.diagnosis.messages import Advice, Answer, Bottleneck, Cause, Caution, Ended, Kept, Undecided
from autotune_loader.results.result import Finding
