"""Memory and time of a training job by closed formulas, before a device is at hand. Nothing here imports torch."""
