"""Files: read whole or mapped, written under temporary names, with errors that name them."""

from __future__ import annotations

import os

PathLike = str | os.PathLike[str]
"""A path as users give it."""
