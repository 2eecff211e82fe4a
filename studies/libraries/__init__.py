"""Does tune() work with the loaders and datasets of other libraries, as people use them?

    make libraries                                   # every attempt; about 20 minutes, results.md and docs/libraries.md
    python -m studies.libraries litdata monai        # those of some libraries; the others' rows stay

    environments.py   a virtual environment for each library, over the one that runs this: torch is not installed again
    table.py          the attempts: texts of code
    attempt.py        the process that makes one: tune(), then an epoch by the library

An attempt ends as one of three: tuned, and the configuration applied for an epoch; refused with one sentence that says what to
pass instead; or wrong. Where it is not obvious what the sentence means, the attempt after it does it.
"""
