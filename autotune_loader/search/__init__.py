"""What to measure next, and what to choose: the twin, the belief, the sampler of the Optuna study.

space         what is legal here, and what it costs         draws     rates as they may be, and workers that are enough
rule          arithmetic on a first batch                   belief    the twin corrected by rates: choice, rival, predictions
observation   one burst's stages                            turns     what is next, and when to stop
queue         the life of n batches                         sampler   proposes every trial of a study
twin          predicts every configuration
"""
