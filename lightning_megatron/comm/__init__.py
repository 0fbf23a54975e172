"""Communication between ranks: collectives with gradients, point-to-point, objects."""
