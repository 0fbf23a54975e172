from __future__ import annotations

import pytest
from chaos import run

# One of six kinds, on two ranks; two hundred, of fourteen kinds in eight layouts, are one call: see chaos.py. The fault
# of two is the job's own, at a step that it is told; the others come at a random moment.
KINDS = {"killed": 0, "stopped": 4, "with_nan": 7, "full_disk": 10, "stuck_worker": 12, "signalled": 14}
OWN = pytest.param(("with_nan", "full_disk"), marks=pytest.mark.gate)
OTHERS = pytest.param(("killed", "stopped", "stuck_worker", "signalled"), marks=pytest.mark.slow)


@pytest.mark.parametrize("kinds", [OWN, OTHERS])
def test_jobs_in_which_a_rank_does_wrong_end_in_time_name_it_and_go_on_bit_for_bit(tmp_path, kinds):
    said: list[str] = []
    seeds = tuple(KINDS[kind] for kind in kinds)
    outcomes = run(seeds, 0, tmp_path, tuple(KINDS), ("tp2",), said.append)
    assert len(outcomes) == len(kinds)
    assert not any(outcome.wrong for found in outcomes.values() for outcome in found), "\n".join(said)
