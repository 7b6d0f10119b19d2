"""What goes wrong for users of systems like this one, and what holds it here; with the tests."""

from __future__ import annotations

from memo_works import Works

_ALLOCATOR = "tests/allocator/test_training.py"
_MEMO = "tests/launch/test_memo_run.py"
_PROTOCOL = "tests/layer/test_protocol.py"

FAULTS = (
    Works(
        "wrong gradients in the first iteration, NaNs under load: a copy overtook another",
        "Every copy to the device waits for its own copy to the host, from iteration 0 on and on "
        "every fallback. The current stream is asked for at each use. `--memo-poison` fills freed "
        "buffers with NaN. Every wait of the protocol is left out once in a test, and caught.",
        (
            f"{_PROTOCOL}::test_slow_late_or_early_copies_change_no_bit_from_iteration_0_on",
            f"{_PROTOCOL}::test_no_wait_of_the_protocol_can_be_left_out",
            "tests/swap/test_cuda.py::test_no_wait_of_the_protocol_can_be_left_out",
        ),
    ),
    Works(
        "tensors of another micro-batch under an interleaved pipeline",
        "What is swapped hangs on the graph of its own forward pass. No queue is read.",
        (
            "tests/launch/test_pipeline.py::"
            "test_one_chunk_is_bitwise_stock_with_micro_batches_in_flight",
        ),
    ),
    Works(
        "activations that survive their iteration",
        "Live tensors, host memory and resident memory after 200 iterations are those after 20.",
        (
            "tests/layer/test_layer.py::test_200_iterations_hold_what_20_hold",
            "tests/layer/test_layer.py::test_nothing_is_left_behind",
        ),
    ),
    Works(
        "two mechanisms claim the same tensors",
        "Refused at start, both flags named.",
        ("tests/launch/test_refusals.py::test_paragraph_names_flag_limit_and_remedy",),
    ),
    Works(
        "recomputation computes something else",
        "Random numbers and autocast are those of the forward pass; routers run once; a function "
        "that does not compute the same twice is caught.",
        (
            "tests/layer/test_segment.py::test_autocast_is_as_it_was_when_a_chunk_is_recomputed",
            "tests/layer/test_segment.py::"
            "test_a_function_that_does_not_compute_the_same_twice_is_caught",
            "tests/layer/test_moe.py::test_routers_run_once_for_each_forward",
        ),
    ),
    Works(
        "a flag that is taken and does nothing",
        "A run that has moved nothing after its first iteration ends, and says why.",
        (
            "tests/launch/test_traffic.py::"
            "test_a_first_step_that_swaps_nothing_ends_the_run_and_says_why",
            "tests/launch/test_checks.py::test_ratio_without_effect_is_refused",
        ),
    ),
    Works(
        "host memory twice as large as planned",
        "One mapping of the exact size a rank, page-locked in place; nothing is rounded up.",
        (
            "tests/swap/test_host.py::"
            "test_half_a_gib_and_a_sixteenth_asked_for_takes_no_more_than_that",
        ),
    ),
    Works(
        "killed in a container that had less memory than the machine",
        "The budget is the tightest of nested control groups (v1 and v2), Slurm's and the "
        "machine's, divided by the node's ranks, less what Megatron declares.",
        (
            "tests/swap/test_host_limits.py::"
            "test_the_tightest_of_nested_groups_counts_and_is_named",
            "tests/swap/test_host_limits.py::test_version_1_nested_with_its_number_for_none",
            "tests/swap/test_host_budget.py::test_what_megatron_declares_is_taken_off",
        ),
    ),
    Works(
        "reserved memory far above what is used, retries, out of memory at step 2",
        "`--memo-plan`: an arena at planned addresses; what the native allocator served is counted "
        "and told.",
        (
            "tests/allocator/test_cuda.py::"
            "test_a_replayed_step_takes_nothing_from_the_native_allocator_but_small_and_native_entries",
            "tests/allocator/test_cuda.py::"
            "test_the_device_is_asked_for_nothing_while_a_plan_is_followed",
        ),
    ),
    Works(
        "an allocator that breaks the others' features",
        "Ours wraps PyTorch's and forwards everything. Statistics, emptied caches, pools, graphs, "
        "shared tensors, history: each works or is refused by name.",
        (
            "tests/allocator/test_cuda_virtuals.py::test_every_virtual_is_forwarded",
            "tests/allocator/test_cuda.py::test_the_arena_is_one_block_of_torchs_statistics",
            "tests/allocator/test_cuda.py::test_a_pools_requests_are_the_pools",
        ),
    ),
    Works(
        "a hang, because ranks decided differently",
        "All ranks take the smallest ratio that one of them found, and switch to a plan together "
        "or not at all.",
        (
            "tests/launch/test_auto_ratio.py::test_all_ranks_take_the_smallest_ratio",
            "tests/launch/test_planned_steps.py::"
            "test_where_one_rank_has_no_plan_none_replays_and_training_goes_on",
        ),
    ),
    Works(
        "out of memory in the loss",
        "Loss and word embedding work in chunks of tokens; whole logits never exist.",
        (
            "tests/ops/test_loss_head.py::test_the_peak_of_the_head_falls_as_one_over_the_chunks",
            "tests/ops/test_loss.py::"
            "test_auto_is_stock_while_logits_are_small_and_cuts_them_when_they_are_not",
        ),
    ),
    Works(
        "a dense mask of tokens by tokens",
        "Never built: the launcher tells the data loader so.",
        (f"{_MEMO}::test_no_dense_mask_is_built",),
    ),
    Works(
        "a resumed run needs more than the one it resumes",
        "It holds the same bytes and repeats the losses. What loading left in caches goes back to "
        "the device before the first step.",
        (
            f"{_MEMO}::test_a_resumed_run_holds_no_more_than_one_that_began",
            f"{_MEMO}::test_stock_checkpoint_trained_on_in_one_swapped_chunk_is_bitwise_stock",
        ),
    ),
    Works(
        "a link slower than its datasheet",
        "Measured at start while all ranks of a node copy, and told in the first line of the log.",
        (
            "tests/swap/test_link.py::test_the_probe_finds_the_links_bandwidth",
            f"{_MEMO}::test_one_line_says_what_memo_does_on_which_limits_and_over_which_link",
        ),
    ),
    Works(
        "copies that no longer overlap",
        "The time that compute stood still for copies is measured in each interval, and told where "
        "it is more than a twentieth.",
        (
            "tests/swap/test_link.py::test_the_exposed_time_is_what_the_link_cannot_hide",
            "tests/launch/test_traffic.py::"
            "test_a_line_is_said_once_while_little_is_waited_and_again_with_advice_when_it_is_much",
        ),
    ),
    Works(
        "evaluation between steps disturbs what follows",
        "Passes without gradients neither swap nor follow the plan.",
        (
            "tests/layer/test_layer.py::test_evaluation_is_stock_and_swaps_nothing",
            f"{_ALLOCATOR}::test_evaluation_is_not_planned",
        ),
    ),
    Works(
        "a plan of yesterday's model",
        "A plan carries what it was made for, and another model's is refused. A request that "
        "differs is served beneath, and the next iteration meets the plan again.",
        (
            "tests/launch/test_plan_source.py::"
            "test_a_plan_of_something_else_is_refused_by_what_differs",
            "tests/allocator/test_fuzz.py::"
            "test_a_million_deviations_never_share_bytes_and_never_last",
        ),
    ),
    Works(
        "a feature that needs three flags, each with an error of its own",
        "One flag is enough.",
        (
            "tests/launch/test_auto_run.py::"
            "test_one_flag_trains_with_the_ratio_that_the_run_measured",
        ),
    ),
)
