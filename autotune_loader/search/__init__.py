"""What to measure next, and what to choose: the twin, the belief, the sampler of the Optuna study, the paired rounds.

space         what is legal here         rule       arithmetic on a first batch      sampler   proposals for a study
observation   one burst's stages         queue      the life of n batches            rounds    who takes turns, until when
contention    stages under load          twin       predicts every configuration     predict   rate and memory, for people
sufficiency   enough workers             belief     the twin corrected by rates      context   cores, step, epoch
"""
