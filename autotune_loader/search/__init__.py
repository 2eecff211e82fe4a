"""What to measure next, and what to choose: the twin, the belief, the sampler of the Optuna study.

space.py        what is legal here, and what it costs
rule.py         arithmetic on a first batch
observation.py  the stages of one burst
queue.py        the life of n batches
twin.py         predicts every configuration from a few bursts
draws.py        rates as they may be, and workers that are enough
belief.py       the twin corrected by rates: choice, rival, predictions
turns.py        what is next, and when to stop
sampler.py      proposes every trial of a study
"""
