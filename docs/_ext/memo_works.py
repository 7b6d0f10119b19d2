"""What works together, with the tests that show it; tests/docs checks that they are there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Works:
    """One row of the page.

    Attributes:
        what: the combination, as Markdown.
        how: what was seen, and its conditions, as Markdown.
        tests: `file::function`, from the root of the repo.
    """

    what: str
    how: str
    tests: tuple[str, ...]


_KINDS = "tests/launch/test_kinds.py"
_MEMO = "tests/launch/test_memo_run.py"
_DATA = "tests/launch/test_data_parallel.py"
_SHARED = "tests/launch/test_shared_sequences.py"
_PLAN = "tests/launch/test_memory_plan.py"

WORKS = (
    Works(
        "GPT and Llama style layers",
        "LayerNorm and GELU; RMSNorm, SwiGLU, grouped queries and RoPE. fp32 and bf16, with and "
        "without dropout. In one chunk bitwise stock, in several up to the order of one sum.",
        (
            "tests/layer/test_exactness.py::test_one_chunk_is_bitwise_stock",
            "tests/layer/test_exactness.py::test_swapping_and_recomputing_change_no_bit",
        ),
    ),
    Works(
        "tensor and sequence parallelism",
        "`--tensor-model-parallel-size 2 --sequence-parallel`, with evaluation between steps.",
        (f"{_MEMO}::test_curves_coincide", f"{_MEMO}::test_validation_losses_coincide"),
    ),
    Works(
        "pipeline parallelism",
        "Uneven stages, and interleaved ones with `--num-layers-per-virtual-pipeline-stage`; "
        "several micro-batches in flight.",
        (
            "tests/launch/test_pipeline.py::"
            "test_one_chunk_is_bitwise_stock_with_micro_batches_in_flight",
        ),
    ),
    Works(
        "data parallelism, the distributed optimizer",
        "`--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather` in bf16, with "
        "gradient accumulation.",
        (
            f"{_DATA}::test_curves_coincide",
            f"{_DATA}::test_everything_swapped_in_one_chunk_is_bitwise_stock",
        ),
    ),
    Works(
        "context parallelism",
        "`--context-parallel-size 2 --cp-comm-type a2a` with memo's own attention. With "
        "Transformer Engine it is Transformer Engine's own, and has not been run on a GPU yet.",
        (f"{_SHARED}::test_two_ranks_that_share_each_sequence_train_as_one_rank_does",),
    ),
    Works(
        "packed documents",
        "`--dataloader-inter-document-masking` and `--sft`, without context parallelism.",
        (
            f"{_SHARED}::test_packed_documents_in_one_chunk_train_bitwise_as_stock_does",
            "tests/launch/test_packed_batches.py::test_conversations_are_sequences_of_their_own",
        ),
    ),
    Works(
        "mixtures of experts",
        "`--num-experts` with `--moe-token-dispatcher-type allgather` or `alltoall`, expert "
        "parallelism, shared experts; `--memo-moe-experts` says what happens to what they save.",
        (
            f"{_KINDS}::test_one_chunk_is_bitwise_stock",
            "tests/layer/test_moe.py::test_one_chunk_is_bitwise_stock_under_every_policy",
        ),
    ),
    Works(
        "multi-latent attention",
        "`--multi-latent-attention --no-rope-fusion`.",
        ("tests/layer/test_latent.py::test_one_chunk_is_bitwise_stock",),
    ),
    Works(
        "multi-token prediction",
        "`--mtp-num-layers`, whose losses are computed in chunks too.",
        (
            f"{_KINDS}::test_what_megatron_logs_beside_the_loss_is_the_same",
            "tests/ops/test_loss_head.py::"
            "test_losses_of_further_tokens_are_stocks_in_any_number_of_chunks",
        ),
    ),
    Works(
        "`--recompute-activations`",
        "Changes nothing: memo's layers keep no attention scores that it would spare. A log line "
        "says so.",
        (f"{_KINDS}::test_the_log_says_what_experts_do_and_that_selective_recompute_does_nothing",),
    ),
    Works(
        "frozen parameters and adapters",
        "Gradients of what is trained are stock's; no gradient is computed for what is not.",
        ("tests/layer/test_frozen.py::test_gradients_of_what_is_trained_are_bitwise_stocks",),
    ),
    Works(
        "checkpoints",
        "From stock Megatron to memo and back: parameters have the same names and shapes.",
        (
            f"{_MEMO}::test_stock_checkpoint_trained_on_in_one_swapped_chunk_is_bitwise_stock",
            f"{_DATA}::test_memos_checkpoint_trained_on_by_upstreams_layer_is_bitwise_stock",
        ),
    ),
    Works(
        "fused weight gradients",
        "Gradient accumulation fusion, with and without `--overlap-grad-reduce`.",
        (
            "tests/layer/test_layer.py::test_fused_weight_gradients_reach_ddp_that_overlaps_its_reduction",
        ),
    ),
    Works(
        "the loss in chunks",
        "`--memo-loss-chunks`: whole logits never exist.",
        (
            "tests/launch/test_loss_head.py::test_in_one_chunk_training_is_bitwise_that_with_whole_logits",
        ),
    ),
    Works(
        "a memory plan",
        "`--memo-plan`, also for a resumed run. On CPUs bit for bit; the CUDA side runs in the "
        "tests against a stand-in for the driver.",
        (
            f"{_PLAN}::test_numbers_are_bitwise_those_without_a_plan",
            f"{_PLAN}::test_a_resumed_run_begins_with_the_saved_plan_and_repeats_the_numbers",
            "tests/allocator/test_cuda_pretrain.py::"
            "test_every_request_of_a_step_is_served_by_the_plan",
        ),
    ),
    Works(
        "a disk behind host memory",
        "`--memo-nvme-path`, `--memo-nvme-budget`: numbers do not change.",
        (f"{_MEMO}::test_what_goes_through_a_disk_is_bitwise_what_goes_through_memory",),
    ),
    Works(
        "Slurm, preemption, resuming",
        "`scripts/slurm/nodes.sbatch` under a real Slurm with two CPU nodes.",
        (
            "tests/slurm/test_slurm.py::"
            "test_a_job_stopped_in_the_middle_resumes_by_itself_and_repeats_the_numbers",
        ),
    ),
    Works(
        "no memo flag at all",
        "Stock Megatron, bitwise.",
        (
            "tests/launch/test_stock.py::"
            "test_trained_parameters_are_bitwise_those_of_a_script_without_memo",
        ),
    ),
)
