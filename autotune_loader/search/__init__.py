"""What to measure next, and what to choose: the twin, the belief, the sampler of the Optuna study.

space         what is legal here         rule       arithmetic on a first batch      sampler   proposes every trial of a study
observation   one burst's stages         queue      the life of n batches            turns     what is next, and when to stop
contention    stages under load          twin       predicts every configuration     draws     rates as they may be
sufficiency   enough workers             belief     the twin corrected by rates      predict   rate and memory, for people
"""
