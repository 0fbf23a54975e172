"""What needs simulated HPUs is collected only where they are simulated: ``test_sessions.py`` starts such sessions."""

from lightning_megatron.testing import hpu

collect_ignore_glob = ["test_sessions.py"] if hpu.enabled() else ["test_[!s]*.py"]
