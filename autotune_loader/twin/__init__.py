"""The twin: predicts the rate of every DataLoader configuration from a few traced bursts. Pure maths, no processes.

observation   times of each stage, from one burst       contention   how service stretches with what is busy, and its fit
queue         the life of n batches                     calibration  all that the bursts taught, and the fixed point
stages        what is asked, and times of every stage   memory       what a configuration takes
prediction    what the twin answers                     model        Twin: fit, predict, ceiling
"""

from autotune_loader.twin.model import Twin
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.prediction import Prediction, Stage
from autotune_loader.twin.queue import simulate, steady_rate

__all__ = ["Observation", "Prediction", "Stage", "Twin", "simulate", "steady_rate"]
