"""The twin: predicts the rate of every DataLoader configuration from a few traced bursts. Pure maths, no processes.

readings      samples of each stage           observation   what one burst tells
levelling     what bursts tell of each other  contention    how service stretches with what is busy, and its fit
recursion     the life of n batches           calibration   all that the bursts taught, and the fixed point
stages        times of every stage            fitting       from bursts to a calibration
orders        batches of a simulated run      prediction    what the twin answers
model         Twin: fit, predict, ceiling
"""

from autotune_loader.twin.model import Twin
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.prediction import Ceiling, Prediction, Stage
from autotune_loader.twin.recursion import simulate, steady_rate

__all__ = ["Ceiling", "Observation", "Prediction", "Stage", "Twin", "simulate", "steady_rate"]
