"""GLM, in versions."""
