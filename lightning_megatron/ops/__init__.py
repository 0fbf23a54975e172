"""The arithmetic that devices have fused versions of: one op a file, its reference in plain torch first.

No file here knows of ranks; whoever needs several ranks to compute one op does so in ``layers/``.
"""
