"""Scenarios run in torchrun processes, as many at a time as ranks; tests judge their answers."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Scenarios that one torchrun answers together: starting one costs more than most scenarios.
TOGETHER = {
    1: (
        "batch_of_two",
        "resident_layers",
        "upstream_variants",
        "flops",
        "peaks",
        "leaks",
        "many_iterations",
        "depths",
        "evaluation",
        "inputs_that_die_early",
        "changes_after_forward",
        "gradient_accumulation_fusion",
        "fusion_under_ddp",
        "state_dicts",
        "markers",
        "frozen",
        "latent_attention",
        "experts",
        "experts_memory",
        "protocol_mutations",
        "forced_delays",
        "footprints",
        "packed",
        "on_disk",
    ),
    2: (
        "batch_of_two",
        "flops",
        "evaluation",
        "gradient_accumulation_fusion",
        "state_dicts",
        "footprints",
        "latent_attention",
        "experts_over_ranks",
        "packed",
    ),
}


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    """answers(scenario, ranks) -> what each rank's scenario returned.

    With `cp`, that many of the ranks share a sequence.
    """

    @cache
    def run(names: tuple[str, ...], ranks: int, cp: int):
        out = tmp_path_factory.mktemp("answers") / "out.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
            "--standalone", str(HERE / "worker.py"), str(out), str(cp), *names,
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
        return json.loads(out.read_text())

    def answer(scenario: str, ranks: int, cp: int = 1):
        together = TOGETHER.get(ranks, ()) if cp == 1 else ()
        names = together if scenario in together else (scenario,)
        return run(names, ranks, cp)[scenario]

    return answer
