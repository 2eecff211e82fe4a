"""The twin: predicts the rate of every DataLoader configuration from a few traced bursts. Pure maths, no processes.

observation   samples of each stage, from one burst    contention   how service stretches with what is busy, and its fit
queue         the life of n batches                    calibration  all that the bursts taught, and the fixed point
stages        times of every stage                     smoothing    what bursts of one kind have in common
epoch         a short epoch, batch by batch            memory       what a configuration takes
prediction    what the twin answers                    model        Twin: fit, predict, ceiling
"""

from autotune_loader.twin.model import Twin
from autotune_loader.twin.observation import Observation
from autotune_loader.twin.prediction import Prediction, Stage
from autotune_loader.twin.queue import simulate, steady_rate

__all__ = ["Observation", "Prediction", "Stage", "Twin", "simulate", "steady_rate"]
