"""What Megatron's training loop asks of a GPT: a batch, a forward step, a loss.

Same behaviour as the launch script of Megatron-LM core 0.19, so that a run without memo flags is
stock Megatron bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers, training
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_memo import compat_versions
from megatron_memo.training.embedding import embedding_by
from megatron_memo.training.loss_head import device_memory, head_of
from megatron_memo.training.modelopt import distillation_loss
from megatron_memo.training.mtp_head import predictions_by

Batch = dict[str, Any]
LossReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

# Everything a batch may hold; a rank's batch has None for what it does not need.
BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)
# What a pipeline stage in the middle needs of a packed batch.
_MIDDLE_STAGE_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

# A loss this many times the largest one seen is reported under --check-for-spiky-loss.
SPIKE = 10

_straggler = StragglerDetector()


def mtp_here(args: Any, vp_stage: int | None) -> bool:
    """Whether this rank holds multi-token prediction layers."""
    return compat_versions.mtp_on_this_rank(core_transformer_config_from_args(args), vp_stage)


def packs(args: Any) -> bool:
    """Whether a sample is several sequences (``--dataloader-inter-document-masking``: 0.19)."""
    return bool(args.sft or getattr(args, "dataloader_inter_document_masking", False))


def get_batch(data_iterator: Iterator[Batch], vp_stage: int | None = None) -> Batch:
    """The next micro-batch on this rank: ``BATCH_KEYS`` to tensors or None.

    The first tensor-parallel rank reads it and sends it to the others. ``tokens``, ``labels`` and
    ``position_ids`` are [b, s] int64, ``loss_mask`` [b, s] float32, ``attention_mask``
    [b, 1, s, s] bool where the loader makes one.
    """
    args = get_args()
    packed = packs(args)
    has_mtp = mtp_here(args, vp_stage)
    at_an_end = is_first_or_last_pipeline_stage(vp_stage) or has_mtp
    if not at_an_end and not packed:
        return dict.fromkeys(BATCH_KEYS)

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    older = compat_versions.older_batch(data_iterator, BATCH_KEYS, has_mtp)
    if older is not None:
        return older
    batch: Batch = {}
    if tp_rank == 0:
        batch = next(data_iterator)
        for key in BATCH_KEYS:
            value = batch.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = utils.get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = utils.flatten_batch_for_packed_sequences(batch)
    if not at_an_end:
        return dict.fromkeys(BATCH_KEYS) | {key: batch[key] for key in _MIDDLE_STAGE_KEYS}

    batch = utils.get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )
    return {key: batch[key] for key in BATCH_KEYS}


def packed_params(batch: Batch, tokens_per_sample: int) -> PackedSeqParams | None:
    """How a packed batch is cut into sequences; None for a batch of whole sequences."""
    if batch["cu_seqlens"] is None:
        return None
    # The batch holds boundaries as [1, n]; attention wants [n].
    real = batch["cu_seqlens"].squeeze(0)
    padded = batch["cu_seqlens_padded"]
    padded = None if padded is None else padded.squeeze(0)
    # Throughput counts real tokens, whatever the padding.
    training.update_seqlen_stats_from_cu_seqlens(real)
    bounds = real if padded is None else padded
    longest = int(batch["max_seqlen"].item())
    cp_size = batch["local_cp_size"]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if cp_size is None else int(cp_size.item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=tokens_per_sample,
    )


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: torch.nn.Module | None = None
) -> LossReport:
    """Sum of the masked token losses of one micro-batch.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        output_tensor: [b, s] loss of each token.
        model: for distillation losses, which read it.

    Returns:
        The loss sum, the number of tokens that count (int32), and ``{"lm loss": [sum, tokens]}``
        for the log.
    """
    args = get_args()
    if getattr(args, "logits_load_dir", None) is not None:  # since 0.19
        loss, tokens, report = _cached_logits_loss(args)(loss_mask, output_tensor, model=model)
    elif getattr(args, "modelopt_enabled", False):
        loss, tokens, report = distillation_loss(loss_mask, output_tensor, model=model)
    else:
        mask = loss_mask.view(-1).float()
        loss = torch.sum(output_tensor.view(-1).float() * mask)
        tokens = mask.sum().clone().detach().to(torch.int)
        report = {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}
    _validate(args, loss)
    return loss, tokens, report


def forward_step(
    data_iterator: Iterator[Batch], model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], LossReport]]:
    """Run the model on the next micro-batch.

    Args:
        data_iterator: where the first tensor-parallel rank reads.
        model: the model, wrapped as Megatron does.
        return_schedule_plan: build upstream's schedule plan instead of running the model.

    Returns:
        The model's output (token losses on the last stage) or the plan, and the loss function.
    """
    args = get_args()
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = packed_params(batch, args.seq_length)
    timers("batch-generator").stop()

    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with _straggler:
        if return_schedule_plan:
            if not args.overlap_moe_expert_parallel_comm:
                raise ValueError("a schedule plan needs --overlap-moe-expert-parallel-comm")
            output = model.build_schedule_plan(*inputs, **targets)  # type: ignore[operator]
        else:
            head = head_of(args, device_memory(args))
            chunked = {} if head is None else {"output_processor": head}
            with predictions_by(head), embedding_by(head, model):
                output = model(*inputs, **targets, packed_seq_params=packed, **chunked)
    return output, functools.partial(loss_func, batch["loss_mask"], model=model)


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Ranks of a pipeline group that hold the embedding's weight: those that embed or classify.

    Args:
        pp_ranks: global ranks of the group, in stage order.
    """
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def _validate(args: Any, loss: torch.Tensor) -> None:
    """Hand the loss to upstream's rerun machine, which reacts to NaN, Inf and spikes."""
    machine = get_rerun_state_machine()
    # Forward is deterministic, so a rerun has to give the same value.
    validate = functools.partial(machine.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        validate(rejection_func=torch.isnan, message="NaN in the forward loss", fatal=True)
        validate(rejection_func=torch.isinf, message="Inf in the forward loss", fatal=True)
    if args.check_for_spiky_loss:
        is_spike = functools.partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        validate(rejection_func=is_spike, message="Loss spike", fatal=False)


@functools.lru_cache(maxsize=1)
def _cached_logits_loss_for(**settings: Any) -> Callable[..., LossReport]:
    from megatron.training.distillation import LossFuncCallable

    return LossFuncCallable(**settings)


def _cached_logits_loss(args: Any) -> Callable[..., LossReport]:
    """Upstream's distillation from cached teacher logits; its reader is opened once a process."""
    return _cached_logits_loss_for(
        logprobs_dir=args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        prefetch_factor=args.logits_load_prefetch_factor,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
    )
