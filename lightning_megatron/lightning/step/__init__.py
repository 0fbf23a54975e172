"""One training step: micro-batches, stages, logs, optimizers."""
