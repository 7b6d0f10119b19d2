"""The one place, besides ``platform/``, that leans on upstream's private parts.

With ``compat_versions``, for what differs between versions. Every function names what it touches,
since which version, and what would let us delete it. Features are detected by attribute or
signature, never by parsing version strings.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from megatron_memo import compat_older
from megatron_memo.compat_versions import describes_models
from megatron_memo.platform.post_import import when_imported

# Python functions that call autograd's engine: torch's own, and upstream's for stages whose output
# has been freed (``megatron.core.pipeline_parallel.schedules.custom_backward``, 0.19). Can go when
# upstream calls ``torch.autograd.backward``.
ENGINE_CALLERS = ("_engine_run_backward", "custom_backward")

_hooks_installed = False


def install_import_hooks() -> None:
    """Register the repairs below to run right after upstream's modules are imported. Idempotent."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    when_imported("megatron.core.datasets.utils", use_packaged_dataset_helper)
    when_imported("megatron.core.optimizer.distrib_optimizer", let_torch_adam_resume)
    when_imported("megatron.core.transformer.moe.moe_utils", compat_older.name_missing_gemm)


def use_packaged_dataset_helper(datasets_utils: ModuleType) -> None:
    """Do not run ``make`` for the dataset helper when a wheel brought it compiled.

    Touches ``megatron.core.datasets.utils.compile_helpers`` (0.19: runs ``make`` beside itself and
    ends the process if that fails; the wheel has the compiled helper and no Makefile). A checkout
    has a Makefile and keeps upstream's function. Can go when upstream looks for the helper first.
    """
    folder = os.path.dirname(os.path.abspath(str(datasets_utils.__file__)))
    has_makefile = os.path.exists(os.path.join(folder, "Makefile"))
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if built and not has_makefile:
        utils: Any = datasets_utils
        utils.compile_helpers = lambda: None


def let_torch_adam_resume(distrib_optimizer: ModuleType) -> None:
    """Make the distributed optimizer load a checkpoint when Adam is torch's own.

    Touches ``DistributedOptimizer`` (0.19), only where neither Transformer Engine nor apex brings
    an Adam. Three faults there, all about torch's per-parameter ``step``:

    * ``state_dict()`` is called while loading, before any step, and asserts that one exists: give
      the optimizer the zero state that torch would create at its first step;
    * ``load_state_dict()`` puts one ``step`` tensor into every parameter's state, which torch then
      increments once per parameter: give each its own;
    * both formats store ``step`` once for all parameters, and then load each parameter's again:
      from a placeholder (0, which restarts the bias correction) or from nowhere (an error).

    Can go when a resumed run with torch's Adam repeats the losses (tests/launch checks).

    Not repaired, because it is the same on every machine: with ``--ckpt-format torch`` and the
    distributed optimizer, ``--ckpt-step N`` chooses the model only; upstream's
    ``load_checkpoint`` (0.19) then takes optimizer state and iteration from the newest checkpoint.
    """
    if getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        return
    cls: Any = distrib_optimizer.DistributedOptimizer  # type: ignore[attr-defined]
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    @functools.wraps(state_dict)
    def state_dict_with_step(self: Any) -> dict:
        inner = self.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and not inner.state:
            for group in inner.param_groups:
                for param in group["params"]:
                    inner.state[param] = {
                        "step": torch.tensor(0.0, dtype=torch.float32),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return state_dict(self)

    @functools.wraps(load_state_dict)
    def load_state_dict_with_own_steps(self: Any, state: dict) -> None:
        load_state_dict(self, state)
        for per_param in self.optimizer.state.values():
            if isinstance(per_param.get("step"), torch.Tensor):
                per_param["step"] = per_param["step"].clone()

    @functools.wraps(set_states)
    def set_states_without_step(self: Any, model_param: torch.Tensor, tensors: dict) -> None:
        # The step that load_state_dict gave stays: it is what is copied into itself.
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        step = self.optimizer.state[main_param].get("step")
        set_states(self, model_param, {**tensors, "step": step})

    cls.state_dict = state_dict_with_step
    cls.load_state_dict = load_state_dict_with_own_steps
    cls._set_main_param_and_optimizer_states = set_states_without_step


def rng_states() -> tuple[Any, ...]:
    """Every random state that upstream's own activation checkpointing restores.

    Those of torch's CPU generator, of CUDA's, and of all streams of Megatron's tracker. Touches
    ``megatron.core.tensor_parallel.random._get_all_rng_states`` (the same in 0.15 to 0.19). This
    function and the two below can go when upstream offers them without the underscore.
    """
    from megatron.core.tensor_parallel import random

    return random._get_all_rng_states()


def set_rng_states(states: tuple[Any, ...]) -> None:
    """Set what ``rng_states`` gave.

    Touches ``megatron.core.tensor_parallel.random._set_all_rng_states`` (the same in 0.15 to 0.19).
    """
    from megatron.core.tensor_parallel import random

    random._set_all_rng_states(*states)


def forked_rng() -> AbstractContextManager[None]:
    """A context after which every random state is what it was before.

    Touches ``megatron.core.tensor_parallel.random._fork_rng`` (the same in 0.15 to 0.19).
    """
    from megatron.core.tensor_parallel import random

    return random._fork_rng()


def forget_norm_input(layer: Any) -> None:
    """Let a layer let go of the tensor that it noted for its pre-MLP norm.

    Touches ``TransformerLayer.mlp_norm_manager`` (0.19): upstream's
    ``_forward_pre_mlp_layernorm`` puts its input there, graph and all, and the end of
    ``_forward_mlp`` takes it away again. Whoever runs the first without the second would keep it
    until the next forward. Can go when the note is a local variable.
    """
    if getattr(layer, "mlp_norm_manager", None) is not None:
        layer.mlp_norm_manager = None


def repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape per cent signs that keep ``--help`` from printing anything.

    Touches the help texts of Megatron's flags (0.19: "10%)" in one of them, which argparse takes
    for a format). Can go when upstream's ``--help`` works.
    """
    for action in parser._actions:
        if action.help is None:
            continue
        try:
            _ = action.help % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")


def wrap_train_step(
    step: Callable[[int, Callable[[], Any]], Any],
    forward_backward: Callable[[int, Callable[[], Any]], Any],
    first: Callable[[list[torch.nn.Module]], Any] | None = None,
) -> None:
    """Run every training step, and the forward and backward inside it, through the given functions.

    Touches ``megatron.training.training.train_step`` (0.19), which the training loop looks up by
    name at each iteration and which gets the schedule as ``forward_backward_func``. Can go when
    upstream's loop takes callbacks around a step.

    Args:
        step: called with the iteration (from 1) and the step to run; returns the step's result,
            whose first entry is the dictionary of losses.
        forward_backward: the same for all micro-batches' forward and backward.
        first: called with the model's chunks before the first step.
    """
    from megatron.training import training

    train_step = training.train_step
    signature = inspect.signature(train_step)
    waiting = [] if first is None else [first]

    @functools.wraps(train_step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        while waiting:
            waiting.pop()(call.arguments["model"])
        iteration = call.arguments["iteration"] + 1  # upstream counts finished ones
        schedule = call.arguments["forward_backward_func"]
        call.arguments["forward_backward_func"] = lambda *a, **k: forward_backward(
            iteration, lambda: schedule(*a, **k)
        )
        return step(iteration, lambda: train_step(*call.args, **call.kwargs))

    training.train_step = wrapped


def change_mtp_spec(change: Callable[[Any, Any, Any], Any]) -> None:
    """Let a function decide what multi-token prediction is made of.

    Touches ``megatron.training.models.gpt.mtp_block_spec`` (0.19), which ``GPTModelBuilder`` looks
    up by name and which takes upstream's own layer for every prediction, whatever the spec of the
    model's layers says. Can go when a model config holds a spec of its prediction layers.

    Args:
        change: called with upstream's spec (or None), the spec of the model's layers and their
            TransformerConfig; returns the spec to use. Before 0.19 memo refuses such models, and
            nothing is called.
    """
    if not describes_models():
        return
    from megatron.training.models import gpt

    upstream = gpt.mtp_block_spec

    @functools.wraps(upstream)
    def changed(config: Any, layer_spec: Any, vp_stage: int | None = None) -> Any:
        spec = upstream(config, layer_spec, vp_stage=vp_stage)
        return change(spec, layer_spec, config.transformer)

    gpt.mtp_block_spec = changed


def change_mtp_loss(process: Callable[..., Any], count: Callable[..., Any]) -> None:
    """Run the losses of multi-token prediction through the given functions.

    Touches ``process_mtp_loss`` as ``megatron.core.models.gpt.gpt_model`` has it, and
    ``_compute_mtp_acceptance_counts`` of ``megatron.core.transformer.multi_token_prediction``
    (0.19), which it calls by name. Can go when upstream's ``output_processor`` is asked for these
    losses as well.

    Args:
        process: called with upstream's function and, by name, its arguments.
        count: called with upstream's function and its arguments; the first is what
            ``output_layer`` returned for logits. Before 0.19 memo refuses such models, and
            nothing is called.
    """
    if not describes_models():
        return
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import multi_token_prediction as mtp

    gpt_model.process_mtp_loss = functools.partial(process, gpt_model.process_mtp_loss)
    mtp._compute_mtp_acceptance_counts = functools.partial(
        count, mtp._compute_mtp_acceptance_counts
    )


def mtp_best_tokens(
    logits: torch.Tensor, output_layer: Any, gathered: bool | None, group: Any
) -> torch.Tensor:
    """The token with the highest logit, [s, b], as upstream finds it to count right predictions.

    Touches ``_mtp_logits_are_vocab_sharded`` and ``_vocab_parallel_argmax`` of
    ``megatron.core.transformer.multi_token_prediction`` (0.19). Can go with ``change_mtp_loss``.

    Args:
        logits: [s, b, v / tp], or [s, b, v] where they are gathered.
        output_layer: what made them.
        gathered: its ``runtime_gather_output``.
        group: the tensor-parallel group, or None.
    """
    from megatron.core.transformer import multi_token_prediction as mtp

    with torch.no_grad():
        size = 1 if group is None else group.size()
        if size > 1 and mtp._mtp_logits_are_vocab_sharded(output_layer, gathered):
            return mtp._vocab_parallel_argmax(logits, group, size)
        return torch.argmax(logits, dim=-1)


def checkpoint_args(args: argparse.Namespace) -> argparse.Namespace | None:
    """The arguments that the checkpoint ``--load`` names was written with.

    Touches ``megatron.training.checkpointing`` (0.19): the names of its files. Nothing but the
    small common part is read (the ``torch`` format is one file, which is mapped, not read). Can go
    when upstream compares shapes before it builds the model.

    Args:
        args: parsed arguments; read are ``load`` and ``ckpt_step``.

    Returns:
        None where there is no checkpoint yet, or its format keeps no arguments that are cheap to
        read.

    Raises:
        ValueError: the folder's tracker file names an iteration that is not there.
    """
    folder = getattr(args, "load", None)
    if folder is None:
        return None
    from megatron.core import dist_checkpointing
    from megatron.training import checkpointing

    tracker = checkpointing.get_checkpoint_tracker_filename(folder)
    if not os.path.isfile(tracker):
        return None
    iteration, release = checkpointing.read_metadata(tracker)
    if getattr(args, "ckpt_step", None):
        iteration = args.ckpt_step
    base = checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True)
    if not os.path.isdir(base):
        raise ValueError(
            f"--load {folder}: its newest checkpoint should be {base}, which is not there. Give "
            "--ckpt-step N for an iteration that is, or another folder."
        )
    if dist_checkpointing.check_is_distributed_checkpoint(base):
        state = dist_checkpointing.load_common_state_dict(base)
    else:
        file = checkpointing.find_checkpoint_rank_0(folder, iteration, release)
        if file is None:
            return None
        state = torch.load(file, map_location="cpu", mmap=True)
    return state.get("args")


# Functions of upstream's (0.19) in which a healthy run reads another number than 1.
_READ_IN = {
    "_reduce_any": 0,  # RerunStateMachine: no rank asks for a rerun
    "_unscale_main_grads_and_check_for_nan": 0,  # MixedPrecisionOptimizer: nothing overflowed
    "get_grad_norm_fp32": 1e6,  # gradients are clipped, which is the larger of the two cases
}
_DEPTH = 8  # frames from such a function to its read


def healthy_value(tensor: torch.Tensor) -> Any:
    """What a one-element tensor without data would hold in a healthy run: no NaN, no overflow.

    Touches the names of three functions in ``megatron.core`` (0.19), whose reads are told from
    others by the call stack. Can go when upstream's steps read nothing on the host.
    """
    if tensor.dtype == torch.bool:
        return False  # "is there a NaN?"
    value: float = 1
    frame = inspect.currentframe()
    for _ in range(_DEPTH):
        if frame is None:
            break
        if frame.f_code.co_name in _READ_IN:
            value = _READ_IN[frame.f_code.co_name]
            break
        frame = frame.f_back
    return float(value) if tensor.dtype.is_floating_point else int(value)


def optimizer_shares(chunks: list[torch.nn.Module]) -> list[tuple[Any, ...]]:
    """What each data-parallel rank of this model-parallel rank updates, by data-parallel rank.

    Touches ``DistributedDataParallel.buffers`` and the buckets and ``param_index_map`` in them
    (0.19), from which the distributed optimizer takes its ranges (``_build_model_gbuf_range``). Can
    go when upstream tells a rank's ranges for other ranks than its own.

    Args:
        chunks: this rank's model chunks, wrapped by Megatron's DDP.

    Returns:
        Plain tuples; equal ones belong to ranks whose optimizers work on equal pieces. One entry
        where the optimizer is not distributed.
    """
    shares: list[list[Any]] = []
    for chunk in chunks:
        if not getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
            continue
        ddp: Any = chunk
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            ranks = buffer.data_parallel_group.size()
            shares += [[] for _ in range(ranks - len(shares))]
            for bucket in buffer.buckets:
                length = bucket.grad_data.numel() // ranks
                for parameter, (start, end, number) in buffer.param_index_map.items():
                    if number != bucket.bucket_id:
                        continue
                    for rank in range(ranks):
                        low = max(start, bucket.offset + rank * length)
                        high = min(end, bucket.offset + (rank + 1) * length)
                        if low < high:
                            # Vectors are not decayed: another group. Copies of a parameter on
                            # several ranks count once in the norm.
                            shared = not getattr(parameter, "tensor_model_parallel", False)
                            kind = parameter.dim() > 1, shared
                            shares[rank].append((high - low, *kind))
    return [tuple(share) for share in shares] or [()]


def rank_kind(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """What sets this rank's requests apart from other ranks' of the same run, as plain values.

    Stage, whether it is the first of its tensor-parallel group (which reads the data, and counts
    the parameters that all of them have), and its share of a distributed optimizer.

    Args:
        chunks: this rank's model chunks, wrapped by Megatron's DDP.
    """
    from megatron.core import parallel_state as mpu

    shares = optimizer_shares(chunks)
    own = mpu.get_data_parallel_rank(with_context_parallel=True) if len(shares) > 1 else 0
    return {
        "pipeline stage": mpu.get_pipeline_model_parallel_rank(),
        "first of its tensor-parallel group": mpu.get_tensor_model_parallel_rank() == 0,
        "share of the optimizer": share_name(shares[own]),
    }


def parameters_of_fullest_rank(args: argparse.Namespace) -> int:
    """Parameters on the rank that holds most of them, before anything is built.

    Touches ``megatron.training.theoretical_memory_usage.compute_weight_and_optimizer_memory``
    (0.19), which tells bytes, 18 a parameter where no optimizer is shared, and writes into its
    arguments. Can go when upstream tells the number.

    Args:
        args: validated.
    """
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    asked = argparse.Namespace(**{**vars(args), "use_distributed_optimizer": False})
    return round(compute_weight_and_optimizer_memory(asked) / 18)


def share_name(share: tuple[Any, ...]) -> str:
    """A short name of what `optimizer_shares` tells of one rank; the same for the same share."""
    return hashlib.sha256(repr(share).encode()).hexdigest()[:12] if share else "all"
