"""What `megatron-memo estimate` says of a config, on the machine that the configs are for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from lib.config import Config
from megatron_memo.estimate.answer import DEFAULT_RESERVE, Answer, answer
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.flags import AUTO, Run, has_flag, host_left_free, read_run, with_flag
from megatron_memo.estimate.hardware import Machine, gpu
from megatron_memo.estimate.strategies import Memo
from megatron_memo.estimate.ways import own_strategy

GPU, HOST_MEMORY = "a800-80g", 2 << 40
RATIO = "--memo-swap-ratio"
CPU_RATIO = 0.5  # the quickstart's
_DECIMALS = 3  # of a ratio that people read


@dataclass(frozen=True)
class Prediction:
    """One config's estimate.

    Attributes:
        config: of which.
        machine: one node.
        answer: memory by arithmetic, time and MFU of a simulated iteration.
    """

    config: Config
    machine: Machine
    answer: Answer

    @property
    def ratio(self) -> float:
        """The swap ratio that the numbers are of."""
        assert isinstance(self.answer.strategy, Memo)
        return self.answer.strategy.ratio


def machine_of(config: Config) -> Machine:
    """Nodes as the configs' headers describe them."""
    return Machine(
        gpu(GPU),
        gpus=config.ranks_per_node,
        host_memory=HOST_MEMORY,
        host_free=host_left_free(config.flags(), HOST_MEMORY),
    )


def chosen_ratio(config: Config) -> float:
    """The ratio that the estimate takes for "auto", rounded down, so that it still fits.

    Raises:
        ValueError: flags that the estimate does not take.
    """
    run = _run(config, config.flags())
    assert run.auto, f"{config.path}: {RATIO} is not {AUTO}"
    costs = Costs(run.job, machine_of(config), None)
    strategy = own_strategy(run, costs, DEFAULT_RESERVE)
    assert isinstance(strategy, Memo)
    return int(strategy.ratio * 10**_DECIMALS) / 10**_DECIMALS


def predict(config: Config, ratio: float) -> Prediction:
    """The estimate with a given swap ratio, by arithmetic.

    Raises:
        ValueError: flags that the estimate does not take.
    """
    run = _run(config, with_flag(config.flags(), RATIO, str(ratio)))
    costs = Costs(run.job, machine_of(config), None)
    strategy = own_strategy(run, costs, DEFAULT_RESERVE)
    return Prediction(config, costs.machine, answer(costs, strategy))


def digest_of(config: Config) -> str:
    """Of what a config says, whatever its comments and its layout."""
    content = [config.nodes, config.ranks_per_node, dict(config.environment)]
    text = json.dumps([*content, dict(config.arguments)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_auto(config: Config) -> bool:
    """Whether the config leaves the ratio to memo."""
    return config.arguments.get(RATIO) == (AUTO,)


def _run(config: Config, words: Sequence[str]) -> Run:
    assert has_flag(words, RATIO), f"{config.path} has no {RATIO}"
    return read_run(words, config.nodes * config.ranks_per_node)
