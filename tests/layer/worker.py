"""Runs a scenario on every rank of a torchrun and writes the answers as JSON, a list of ranks.

torchrun --nproc-per-node 2 worker.py OUT.json CP SCENARIO

CP of the ranks share a sequence (context parallelism); the others are tensor-parallel.
"""

import json
import sys

import scenarios  # first: it activates the platform before anything imports Megatron
import scenarios_frozen
import scenarios_latent
import scenarios_moe
import shared_sequences
import torch.distributed as dist
from megatron.core import parallel_state

SCENARIOS = (scenarios, scenarios_moe, scenarios_frozen, scenarios_latent, shared_sequences)


def main(out: str, cp: str, name: str) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dist.get_world_size() // int(cp),
        context_parallel_size=int(cp),
    )
    answers = [None] * dist.get_world_size()
    where = next(module for module in SCENARIOS if hasattr(module, name))
    dist.all_gather_object(answers, getattr(where, name)())
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(answers, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
