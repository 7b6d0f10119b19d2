"""Efficiencies from a measured run: the cost model's numbers, scaled until the estimate meets it.

One step time tells one number: everything that computes is scaled by the same factor. Where the run
swapped and its backend tells how long compute stood still for copies, the links are scaled too, so
that the simulated waits are the measured ones.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_memo.estimate.calibration import Calibration
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.flags import Run
from megatron_memo.estimate.hardware import CPU
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.strategies import FullRecompute, Strategy
from megatron_memo.estimate.timeline import Result, simulate

_COMPUTE = ("gemm", "attention_forward", "attention_backward", "memory")
_LINKS = {"D2H": ("d2h", "exposed_d2h_s"), "H2D": ("h2d", "exposed_h2d_s")}
_LEAST, _MOST = 1e-5, 100.0  # of a factor
_HALVINGS = 30
_FREE = 1e6  # a link's bandwidth, by which nobody waits for it
_NO_WAIT = 0.005  # of a step: waits below are none
# What makes a model another one to whoever reads a calibration: efficiencies follow its widths,
# not its depth, its length or its layout.
_WIDTHS = ("hidden", "ffn", "heads", "head_dim", "groups", "gated", "element_bytes")


# Kernels of the layer: which of them run depends on the machine as well as on flags.
_KERNELS = ("saved_rope", "fused_activation")
# What says how ranks talk to one another, and when there is nobody to talk to.
_IDLE: dict[str, Callable[[Job], bool]] = {
    "overlap_p2p": lambda job: job.pp == 1,
    "virtual_group": lambda job: job.virtual == 1,
    "cp_kind": lambda job: job.cp == 1,
    "overlap_tp": lambda job: job.tp == 1,
    "overlap_grad_reduce": lambda job: job.dp * job.cp == 1,
    "overlap_param_gather": lambda job: job.dp * job.cp == 1,
}
# Flags of a job's fields whose names are others.
_FLAGS = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "ffn": "--ffn-hidden-size",
    "heads": "--num-attention-heads",
    "head_dim": "--kv-channels",
    "groups": "--num-query-groups",
    "vocabulary": "--vocab-size (padded)",
    "sequence": "--seq-length",
    "micro_batch": "--micro-batch-size",
    "micro_batches": "--global-batch-size in micro-batches of a rank",
    "gated": "--swiglu",
    "biases": "--disable-bias-linear (turned round)",
    "tied": "--untie-embeddings-and-output-weights (turned round)",
    "rope": "--position-embedding-type rope",
    "rms_norm": "--normalization RMSNorm",
    "qk_norm": "--qk-layernorm",
    "dropout": "--hidden-dropout",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "dp": "the number of data-parallel ranks (--nodes x --gpus-per-node)",
    "virtual": "--num-virtual-stages-per-pipeline-rank",
    "virtual_group": "--microbatch-group-size-per-virtual-pipeline-stage",
    "first_layers": "--decoder-first-pipeline-num-layers",
    "last_layers": "--decoder-last-pipeline-num-layers",
    "embedding_as_layer": "--account-for-embedding-in-pipeline-split",
    "loss_as_layer": "--account-for-loss-in-pipeline-split",
    "element_bytes": "--bf16 or --fp16, in bytes of an element,",
    "gradient_bytes": "--grad-reduce-in-bf16, in bytes of a gradient,",
    "distributed_optimizer": "--use-distributed-optimizer",
    "overlap_tp": "--tp-comm-overlap",
    "overlap_p2p": "--no-overlap-p2p-communication (turned round)",
    "cp_kind": "--cp-comm-type",
    "experts": "--num-experts, or another flag of the experts,",
    "latent": "--multi-latent-attention, or another flag of it,",
    "layout": "--pipeline-model-parallel-layout",
}
_MEMO_FLAGS = {
    "swap_ratio": "--memo-swap-ratio",
    "chunks": "--memo-chunks",
    "resident_layers": "--memo-resident-layers",
    "prefetch_depth": "--memo-prefetch-depth",
    "moe_experts": "--memo-moe-experts",
}


def flag_of(name: str) -> str:
    """The flag that a job's field comes from."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


@dataclass(frozen=True)
class Measured:
    """What a report of `--memo-report` says.

    Attributes:
        seconds: of an iteration: the median of those that are timed and steady.
        waits: seconds of an iteration that compute stood still, by stream; empty where unknown.
        job: sizes and layout by name.
        memo: settings by name; None where memo was off.
        recompute: --recompute-granularity.
        device: the name that CUDA gives it, or "cpu".
    """

    seconds: float
    waits: dict[str, float]
    job: dict[str, Any]
    memo: dict[str, Any] | None
    recompute: str | None
    device: str


def read_report(path: Path) -> Measured:
    """What was measured.

    Raises:
        ValueError: not there, no report, of too few iterations, or without the model's sizes.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: this is no JSON file, and no report") from None
    try:
        iterations, memo, job = report["iterations"], report["memo"], report["job"]
        recompute = report["recompute"]
        # The first iteration holds what is done once.
        timed = [float(one["seconds"]) for one in iterations[1:] if not one["metered"]]
        swap, device = report["swap"] or {}, str(report["device"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path}: this is no report of --memo-report, or one of an older version"
        ) from None
    if job is None:
        raise ValueError(f"{path}: the run trained a model of a kind that no estimate knows")
    if not timed:
        raise ValueError(
            f"{path}: no iteration after the first was timed. Train for three or more, and meter "
            "memory (--memo-measure-memory) in the last one at most."
        )
    waits = _waits(swap, len(iterations))
    return Measured(statistics.median(timed), waits, job, memo, recompute, device)


def _waits(swap: dict[str, Any], iterations: int) -> dict[str, float]:
    told = {stream: swap.get(name) for stream, (_, name) in _LINKS.items()}
    known = {stream: float(wait) / iterations for stream, wait in told.items() if wait is not None}
    return known if len(known) == len(told) else {}


def same_run(path: Path, measured: Measured, run: Run) -> Run:
    """The run of the flags, as the report says that it ran.

    Kernels follow the machine (the launcher adds --no-rope-fusion where there is no CUDA), and what
    Megatron hides behind compute does not matter where nobody communicates: of these the report
    is believed.

    Raises:
        ValueError: it is of another model, layout or settings than the flags.
    """
    ours, memo = asdict(run.job), run.memo
    free = {name for name in _KERNELS if name in measured.job}
    free |= {name for name, alone in _IDLE.items() if alone(run.job) and name in measured.job}
    differing = [
        f"{flag_of(name)} is {_said(measured.job.get(name))} there and {_said(value)} here"
        for name, value in ours.items()
        if name not in free and _plain(measured.job.get(name)) != _plain(value)
    ]
    recompute = "full" if isinstance(run.strategy, FullRecompute) else None
    if measured.recompute != recompute:
        there, here = _said(measured.recompute), _said(recompute)
        differing.append(f"--recompute-granularity is {there} there and {here} here")
    theirs = measured.memo
    if (theirs is None) != (memo is None):
        on, off = ("there", "here") if memo is None else ("here", "there")
        differing.append(f"--memo-swap-ratio is given {on} and not {off}")
    elif theirs is not None and memo is not None:
        differing += [
            f"{_MEMO_FLAGS[name]} is {_said(theirs[name])} there and {_said(value)} here"
            for name, value in asdict(memo).items()
            if name in _MEMO_FLAGS and name in theirs and theirs[name] != value
        ]
    if differing:
        raise ValueError(
            f"{path}: the report is of another run: {'; '.join(differing)}. Give the flags that it "
            "was made with."
        )
    return replace(run, job=replace(run.job, **{name: measured.job[name] for name in free}))


def check_device(path: Path, measured: Measured, gpu: str) -> None:
    """Raises ValueError where a report of a CPU run should calibrate a GPU, or the reverse."""
    if (measured.device == CPU) != (gpu == CPU):
        raise ValueError(
            f"--gpu {gpu}: {path} was measured on {measured.device}. Give --gpu "
            f"{CPU if measured.device == CPU else 'NAME, the GPU that it ran on'}."
        )


def check_measured_on(path: Path, measured_on: dict[str, Any], job: Job, gpu: str) -> None:
    """Raises ValueError where a calibration is of another GPU, or of a model of other widths."""
    if measured_on.get("gpu") != gpu:
        raise ValueError(
            f"--calibration {path}: is of {measured_on.get('gpu')}, and --gpu is {gpu}. Calibrate "
            "with a run on that GPU, or drop --calibration."
        )
    theirs, ours = measured_on.get("job") or {}, asdict(job)
    differing = [
        f"{flag_of(name)} is {_said(theirs.get(name))} there and {_said(ours[name])} here"
        for name in _WIDTHS
        if theirs.get(name) != ours[name]
    ]
    if differing:
        raise ValueError(
            f"--calibration {path}: is of another model: {'; '.join(differing)}. Calibrate with a "
            "run of this one (fewer layers and shorter sequences will do), or drop --calibration."
        )


def calibrated(costs: Costs, strategy: Strategy, measured: Measured) -> Calibration:
    """The efficiencies with which the simulated iteration takes as long as the measured one.

    Args:
        costs: of the measured job, with the efficiencies to begin with.
        strategy: what the run did about activations.
        measured: the run.

    Raises:
        ValueError: the run was faster than the datasheet's rates allow.
    """

    def simulated(efficiency: Calibration) -> Result:
        return simulate(Costs(costs.job, costs.machine, efficiency), strategy)

    # Without its waits for copies a run is one whose links are as fast as may be.
    working = measured.seconds - sum(measured.waits.values())
    links = tuple(name for name, _ in _LINKS.values()) if measured.waits else ()
    free = _scaled(costs.efficiency, links, _FREE)
    fastest = 1 / max(getattr(free, name) for name in _COMPUTE)
    quickest = simulated(_scaled(free, _COMPUTE, fastest)).seconds
    if quickest > working * (1 + _NO_WAIT):
        raise ValueError(
            f"the report's {working:.4g} s an iteration, waits for copies left out, are less than "
            f"the {quickest:.4g} s that {costs.machine.gpu.name} would need at its full rate. Give "
            "the GPU that it ran on."
        )

    def too_slow(factor: float) -> bool:
        return simulated(_scaled(free, _COMPUTE, factor)).seconds > working

    found = _scaled(costs.efficiency, _COMPUTE, _least_factor(too_slow, fastest))
    # A wait for one link gives the other time; the second round takes that in.
    for stream, wait in 2 * list(measured.waits.items()):
        found = _link_calibrated(found, stream, wait, measured.seconds, simulated)
    return replace(found, source="a measured run")


def _link_calibrated(
    before: Calibration,
    stream: str,
    wait: float,
    seconds: float,
    simulated: Callable[[Calibration], Result],
) -> Calibration:
    names, none = (_LINKS[stream][0],), _NO_WAIT * seconds
    now = simulated(before).exposed[stream]
    if max(wait, now) <= none:
        return before  # whatever the link's bandwidth, it was enough

    def waits_longer(factor: float) -> bool:
        return simulated(_scaled(before, names, factor)).exposed[stream] > max(wait, none)

    return _scaled(before, names, _least_factor(waits_longer, _MOST))


def _least_factor(too_small: Callable[[float], bool], most: float) -> float:
    """The smallest factor up to `most` that is not too small, by halving on a logarithmic scale."""
    low, high = _LEAST, most
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return high


def _scaled(efficiency: Calibration, names: tuple[str, ...], factor: float) -> Calibration:
    return replace(efficiency, **{name: getattr(efficiency, name) * factor for name in names})


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))


def _said(value: Any) -> str:
    return "off" if value in (None, False) else "on" if value is True else str(value)
