"""Arithmetic for which devices have fused implementations: one op per file, its reference in plain torch first.

Nothing here depends on ranks. Ops that several ranks compute together are in ``layers/`` and ``context_parallel/``.
"""
