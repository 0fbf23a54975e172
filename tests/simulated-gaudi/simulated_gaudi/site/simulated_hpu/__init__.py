"""Stand-in for Gaudi's hardware and driver: a torch device on the host's memory, and collectives over gloo.

``habana_frameworks`` next to it uses this package, as the real one uses the real driver. Neither imports
``lightning_megatron``: both are loaded at the end of ``import torch``.
"""
