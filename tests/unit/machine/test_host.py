"""Limits of the host that a job meets before its first step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_sockets_get_a_folder_with_a_short_path_or_the_fault_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 120)
    long.mkdir()
    code = """if True:
        import os, sys, tempfile
        from multiprocessing.connection import Listener
        from lightning_megatron.machine.host import shorten_socket_paths
        assert "torch" not in sys.modules
        given = tempfile.gettempdir()
        found = shorten_socket_paths(sys.argv[1:])
        assert tempfile.gettempdir() == given, "files stay where they were"
        print(found.value, found.fault, sep="|")
        if not found.fault:
            Listener(family="AF_UNIX").close()
    """

    def outcome(temporary: Path, *folders: str) -> list[str]:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        run = [sys.executable, "-c", code, *folders]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split("|")

    assert outcome(Path("/tmp")) == ["/tmp", ""]
    before = set(os.listdir("/tmp"))
    assert outcome(long, "/nowhere", "/tmp") == ["/tmp", ""]
    assert not [name for name in set(os.listdir("/tmp")) - before if name.startswith("pymp-")]
    value, fault = outcome(long)
    assert value == str(long)
    assert fault == "its path is too long for a socket: workers of DataLoaders need one of at most 71 bytes"
