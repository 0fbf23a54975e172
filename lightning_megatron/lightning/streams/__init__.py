"""Data that end earlier on one rank than on another, or never begin, are an error on every rank.

Ranks wait for each other in every training step, and those of one replica in every step of evaluation. One whose data
have ended comes no more, and the others would wait until they time out.
"""

from lightning_megatron.lightning.streams.evaluation import EvaluationWatch
from lightning_megatron.lightning.streams.training import TrainingWatch

__all__ = ["EvaluationWatch", "TrainingWatch"]
