"""What stands in for Gaudi's hardware and driver: a torch device on the host's memory, and collectives over gloo.

``habana_frameworks`` beside it is written on top of this, as the real one is on top of the real driver. Neither imports
``lightning_megatron``: both are loaded at the end of ``import torch``.
"""
