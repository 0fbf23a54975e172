"""Tools around training: plans, proofs, launchers, evaluation, recipes and commands. A run loads none by itself."""
