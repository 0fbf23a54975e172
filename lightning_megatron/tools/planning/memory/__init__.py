"""Memory of one rank by closed formulas, derived from the tensors that our layers keep."""
