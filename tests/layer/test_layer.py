"""What the layer recomputes, keeps, frees and shares with upstream."""

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test that asks runs the scenarios

both_layouts = pytest.mark.parametrize("ranks", [1, 2], ids=lambda ranks: f"tp{ranks}")


@both_layouts
def test_recompute_redoes_exactly_one_minus_alpha_of_all_but_the_second_mlp_projection(
    answers, ranks
):
    for row in (row for rank in answers("flops", ranks) for row in rank):
        dropped = row["sequence"] - round(row["ratio"] * row["sequence"] / ranks) * ranks
        expected = row["layers"] * dropped * row["redone_flops_per_token"]
        assert row["extra_flops"] == expected, row


@both_layouts
def test_attention_runs_once_forward_and_once_backward(answers, ranks):
    for row in (row for rank in answers("flops", ranks) for row in rank):
        assert row["attention_forwards"] == row["layers"], row
        assert row["attention_backwards"] == row["layers"], row


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_peak_of_ratio_1_in_layers_is_at_most_full_recompute_plus_two_layers_skeletals(
    answers, style
):
    (peaks,) = answers("peaks", 1)
    limit = peaks[style]["full recompute"] + peaks[style]["two layers' skeletals"]
    for chunks in (1, 4):
        assert peaks[style][f"memo 1.0 {chunks} layers"] <= limit


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_peak_of_ratio_1_with_4_of_17_steps_in_flight_is_at_most_70_percent_of_full_recompute(
    answers, style
):
    (peaks,) = answers("peaks", 1)
    assert peaks[style]["memo 1.0 8 4"] <= 0.7 * peaks[style]["full recompute"]
    assert peaks[style]["memo 1.0 8 4"] < peaks[style]["memo 1.0 8 auto"]
    assert peaks[style]["memo 1.0 8 auto"] < peaks[style]["memo 1.0 4 layers"]


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_peak_of_ratio_0_with_8_chunks_is_at_most_half_of_full_recompute(answers, style):
    (peaks,) = answers("peaks", 1)
    assert peaks[style]["memo 0.0 4 auto"] <= 0.6 * peaks[style]["full recompute"]
    assert peaks[style]["memo 0.0 8 4"] <= 0.5 * peaks[style]["full recompute"]
    assert peaks[style]["full recompute"] < peaks[style]["stock"]


@both_layouts
def test_two_sequences_in_a_micro_batch(answers, ranks):
    for rank in answers("batch_of_two", ranks):
        assert rank and all(not names for names in rank.values()), rank


def test_resident_layers_swap_nothing_and_change_no_number(answers):
    (by_count,) = answers("resident_layers", 1)
    assert all(not names for names, _ in by_count.values())
    swapped = [swapped_bytes for _, swapped_bytes in by_count.values()]
    assert swapped == sorted(swapped, reverse=True) and len(set(swapped)) == len(swapped)
    assert swapped[-1] == 0  # every layer resident


def test_variants_of_upstreams_attention_are_bitwise_stock(answers):
    (variants,) = answers("upstream_variants", 1)
    assert len(variants) == 6
    for name, differing in variants.items():
        assert differing == [[], []], name


@both_layouts
def test_evaluation_is_stock_and_swaps_nothing(answers, ranks):
    for rank in answers("evaluation", ranks):
        assert rank["one_chunk_bitwise"]
        assert rank["chunked_error"] == 0
        assert rank["d2h_bytes"] == 0


@pytest.mark.parametrize(
    "between",
    ["nothing", "forward only", "evaluation", "failure", "failure in backward", "other depth"],
)
def test_nothing_is_left_behind(answers, between):
    """Live tensors, host bytes and results stay the same over iterations, whatever else ran."""
    (by_name,) = answers("leaks", 1)
    first, *others = by_name[between][1:]
    assert all(other == first for other in others)
    assert all(same for _, _, same in by_name[between])


def test_200_iterations_hold_what_20_hold(answers):
    """With the garbage collector off: live tensors and host bytes stay, resident memory within a
    MiB."""
    (held,) = answers("many_iterations", 1)
    (tensors, host, resident), *later = held
    assert len(later) == 9
    assert {row[:2] for row in map(tuple, later)} == {(tensors, host)}
    assert later[-1][2] - resident <= 1 << 20


@both_layouts
def test_fused_weight_gradients_reach_main_grad(answers, ranks):
    for rank in answers("gradient_accumulation_fusion", ranks):
        assert len(rank) == 6
        for name, got in rank.items():
            assert got["nonzero"], name
            # main_grad is fp32 and each chunk is added to it in fp32, in bf16 training as well.
            assert got["bitwise"] if name.endswith(" 1") else got["error"] < 1e-6, (name, got)


def test_fused_weight_gradients_reach_ddp_that_overlaps_its_reduction(answers):
    """Norms' gradients of several chunks are summed in fp32 and rounded once, weights' not at all:
    one bf16 rounding (2^-9 at most of each value) where stock has one."""
    (rows,) = answers("fusion_under_ddp", 1)
    assert len(rows) == 6
    for name, got in rows.items():
        assert got["nonzero"], name
        limit = 2**-8 if name.startswith("bf16") else 1e-6
        assert got["bitwise"] if name.endswith(" 1") else got["error"] < limit, (name, got)


@both_layouts
def test_checkpoints_are_interchangeable_with_upstreams_layer(answers, ranks):
    for rank in answers("state_dicts", ranks):
        assert rank["same"] and not rank["missing"] and not rank["unexpected"]


def test_memory_of_inputs_that_the_caller_drops_may_be_used_again(answers):
    """An activation that lands where a dropped mask was must not be taken for the mask."""
    (same,) = answers("inputs_that_die_early", 1)
    assert len(same) == 12
    assert all(same.values()), same


def test_what_backward_needs_may_not_change_in_place_as_in_stock(answers):
    (said,) = answers("changes_after_forward", 1)
    assert len(said) == 6
    for case, message in said.items():
        assert "modified by an inplace operation" in message, (case, message)


def test_layers_and_chunks_say_when_their_forward_and_backward_begin(answers):
    (heard,) = answers("markers", 1)
    chunks = {1: ["chunk 0", "chunk 1"], 2: ["chunk 0", "chunk 1", "chunk 2"]}

    def steps(layer, direction, order):
        whole = f"layer {layer} {direction} of micro-batch 0"
        parts = [f"layer {layer} {c} {direction} of micro-batch 0" for c in order(chunks[layer])]
        # forward: layer, pre of each chunk, attention, post of each; backward likewise
        return [whole, *parts, whole, *parts]

    def reverse(names):
        return names[::-1]

    assert heard["training"] == [
        *(*steps(1, "forward", list), *steps(2, "forward", list)),
        *(*steps(2, "backward", reverse), *steps(1, "backward", reverse)),
    ]
    assert heard["evaluation"] == []


def test_files_change_no_number_and_hold_what_the_host_budget_does_not(answers):
    (by_part,) = answers("on_disk", 1)
    assert list(by_part) == ["0.3", "1.0"]
    for part, found in by_part.items():
        assert found["differs"] == [[], []], part
        assert found["host_bytes"] <= found["budget"]
        assert found["disk_bytes"] >= float(part) * found["need"]
        assert found["names_left"] == []
