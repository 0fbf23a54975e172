"""Every private name of Lightning that this package touches, in one place; `tests/trainer/test_private.py` holds it.

Checked on Lightning 2.6.6. Everything else that the package uses of Lightning is public.
"""

from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)

__all__ = ["SubprocessScriptLauncher"]
