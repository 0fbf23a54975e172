"""The planner answers before torch is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

import lightning_megatron

PACKAGE = Path(lightning_megatron.__file__).parent


def test_no_module_of_the_planner_loads_torch():
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted((PACKAGE / "tools" / "planning").rglob("*.py"))
    ]
    assert "lightning_megatron.tools.planning.core.job" in names
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
