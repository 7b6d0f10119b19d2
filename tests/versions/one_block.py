"""A block of layers of the installed megatron-core against memo's, as JSON on the last line.

python tests/versions/one_block.py, in an environment of any supported version, with the repo and
tests/layer on PYTHONPATH.
"""

import dataclasses
import json
import tempfile

import harness  # first: it activates the platform before anything imports Megatron
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_memo import compat_versions
from megatron_memo.config import MemoConfig
from megatron_memo.layer.spec import block_spec
from megatron_memo.swap.engine import get_engine

TOKENS, EVERYTHING = 96, 99
LAYERS = 3


def answer() -> dict:
    cfg = harness.config("llama", layers=LAYERS, transformer_impl="local")
    given = harness.data(cfg, TOKENS, micro_batches=2)
    stock = harness.run(harness.block(cfg, None), given)
    found = {"version": compat_versions.version()}
    for name, ratio, chunks in (("swapped", 1.0, 1), ("recomputed", 0.0, 1), ("both", 0.5, 3)):
        harness.fresh_engine()
        memo = MemoConfig(ratio, chunks, resident_layers=0, poison=True, min_swap_bytes=0)
        built = harness.block(cfg, memo)
        got = harness.run(built, given)
        moved = get_engine().stats()["d2h_bytes"]
        if chunks > 1:  # against the same chunks with everything kept
            for layer in built.layers:
                layer.memo = dataclasses.replace(memo, resident_layers=EVERYTHING)
            stock = harness.run(built, given)
        found[name] = {"differing": harness.differing(stock, got), "moved": moved}
    if not compat_versions.describes_models():
        found["by function"] = [
            type(layer).__name__
            for layer in TransformerBlock(cfg, spec_function, post_layer_norm=False).layers
        ]
    return found


def spec_function(config, vp_stage=None):
    """As `--spec` names one in a launch script before 0.19."""
    return block_spec(config, MemoConfig(0.5), vp_stage)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        print(json.dumps(answer()))
        dist.destroy_process_group()
