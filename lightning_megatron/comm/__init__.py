"""How ranks talk: collectives with gradients, and point-to-point."""
