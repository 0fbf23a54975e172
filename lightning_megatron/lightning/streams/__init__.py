"""Checks for data that end earlier on one rank than on another, or never begin: an error on every rank.

Ranks wait for each other in every training step, and ranks of one replica in every step of evaluation. A rank whose
data have ended joins no further step, and the others would wait for it until they time out.
"""

from lightning_megatron.lightning.streams.evaluation import EvaluationWatch
from lightning_megatron.lightning.streams.training import TrainingWatch

__all__ = ["EvaluationWatch", "TrainingWatch"]
