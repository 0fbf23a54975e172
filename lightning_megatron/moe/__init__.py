"""Mixture of experts: who decides, who carries, who computes.

``router`` chooses experts for tokens, ``dispatch`` brings tokens to the ranks that hold them and back, ``experts``
computes, ``layer`` puts the three together. Shapes: ``T`` tokens of this rank, ``E`` experts, ``k`` of them a token.
"""
