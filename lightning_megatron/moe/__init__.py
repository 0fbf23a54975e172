"""Mixture of experts.

``router`` chooses experts for tokens, ``dispatch`` sends tokens to the ranks of their experts and back, ``experts``
computes, ``layer`` combines the three. Shapes: ``T`` tokens of this rank, ``E`` experts, ``k`` choices of a token.
"""
