"""The distributed optimizer: flat gradients, sharded main parameters, clipping, loss scale, learning-rate schedules."""
