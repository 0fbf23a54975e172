from __future__ import annotations

import pytest
from chaos import run
from faulty import TIMEOUT
from patience import PATIENCE

# One of six kinds, on two ranks; two hundred, of fourteen kinds in eight layouts, are one call: see chaos.py. The fault
# of two is the job's own, at a step that it is told: these jobs end by that event, and so their collectives may take
# longer than the test waits. The others come at a random moment, and end by a time.
KINDS = {"killed": 0, "stopped": 4, "with_nan": 7, "full_disk": 10, "stuck_worker": 12, "signalled": 14}
OWN = pytest.param(("with_nan", "full_disk"), 2 * PATIENCE, marks=pytest.mark.gate, id="own")
OTHERS = pytest.param(("killed", "stopped", "stuck_worker", "signalled"), TIMEOUT, marks=pytest.mark.slow, id="others")


@pytest.mark.parametrize(("kinds", "timeout"), [OWN, OTHERS])
def test_jobs_in_which_a_rank_does_wrong_end_in_time_name_it_and_go_on_bit_for_bit(tmp_path, kinds, timeout):
    said: list[str] = []
    seeds = tuple(KINDS[kind] for kind in kinds)
    outcomes = run(seeds, 0, tmp_path, tuple(KINDS), ("tp2",), said.append, timeout)
    assert len(outcomes) == len(kinds)
    assert not any(outcome.wrong for found in outcomes.values() for outcome in found), "\n".join(said)
