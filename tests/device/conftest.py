"""What needs simulated HPUs is collected only where they are simulated: ``test_profiles.py`` starts such sessions."""

from lightning_megatron.testing import hpu

collect_ignore_glob = [] if hpu.enabled() else ["test_conformance_*.py"]
