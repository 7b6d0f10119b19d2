"""Runs `scenarios` on every rank of a torchrun and writes their answers as JSON, a list per rank.

torchrun --nproc-per-node 2 worker.py OUT.json SCENARIO [SCENARIO ...]
"""

import json
import sys

import harness  # first: it activates the platform before anything imports Megatron
import moe_scenarios
import scenarios
import torch.distributed as dist
from megatron.core import parallel_state

SCENARIOS = (scenarios, moe_scenarios)


def main(out: str, *names: str) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    answers = {}
    for name in names:
        harness.fresh_engine()
        gathered = [None] * dist.get_world_size()
        where = next(module for module in SCENARIOS if hasattr(module, name))
        dist.all_gather_object(gathered, getattr(where, name)())
        answers[name] = gathered
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(answers, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
