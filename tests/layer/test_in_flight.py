"""Layers whose activations a stage holds at once. tests/launch/test_pipeline.py has real runs."""

from argparse import Namespace

import pytest

from megatron_memo.layer.in_flight import most_held


def args(pp, layers, micro_batches, vp=None, **other):
    return Namespace(
        **dict(
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            num_layers=layers,
            micro_batch_size=1,
            global_batch_size=micro_batches * 3,
            data_parallel_size=3,
        )
        | other
    )


@pytest.mark.parametrize(
    ("pp", "layers", "micro_batches", "vp", "resident", "passes"),
    [
        (1, 32, 8, None, 0, 32),  # each micro-batch's backward follows its forward
        (1, 32, 8, None, 2, 30),
        (4, 32, 8, None, 0, 4 * 8),  # the first stage is 3 forwards ahead
        (4, 32, 2, None, 0, 2 * 8),  # not more than there are
        (4, 32, 8, None, 32, 0),
        # Interleaved: 4 + 1 chunks of 2 layers, 2 (p - 1) + (v - 1) p forwards ahead.
        (2, 8, 4, 2, 0, (2 + 2 + 1) * 2),
        (4, 64, 64, 4, 0, (6 + 12 + 1) * 4),
        (2, 8, 2, 2, 0, 4 * 2),  # all forwards first
    ],
)
def test_the_fullest_stage_holds(pp, layers, micro_batches, vp, resident, passes):
    held = most_held(args(pp, layers, micro_batches, vp), resident)
    assert held.passes == passes
    assert held.stage == 0 or passes == 0


def test_resident_layers_are_the_last_stages():
    assert most_held(args(2, 8, 4), 4).layers == 4  # the first stage has none of them
    assert most_held(args(2, 8, 4), 6).layers == 2


def test_a_long_last_stage_can_hold_more_than_the_first():
    uneven = args(2, 12, 1, decoder_first_pipeline_num_layers=2)
    held = most_held(uneven, 0)
    assert (held.stage, held.passes) == (1, 10)


def test_an_embedding_that_counts_as_a_layer_takes_one_from_the_first_stage():
    uneven = args(2, 7, 8, account_for_embedding_in_pipeline_split=True)
    assert most_held(uneven, 0).passes == 2 * 3


def test_layers_of_multi_token_prediction_are_the_last_stages_too():
    assert most_held(args(1, 8, 4, mtp_num_layers=2), 0).passes == 10
    assert most_held(args(1, 8, 4, mtp_num_layers=2), 3).passes == 7  # two of the three are theirs
    assert most_held(args(2, 8, 1, mtp_num_layers=2), 0).stage == 1


def test_a_custom_layout_is_what_the_stages_have():
    words = "Et*3|t*5L"
    held = most_held(args(2, 8, 1, pipeline_model_parallel_layout=words), 0)
    assert (held.stage, held.passes) == (1, 5)
    assert most_held(args(2, 8, 4, pipeline_model_parallel_layout=words), 0).passes == 2 * 3
    assert most_held(args(2, 8, 1, pipeline_model_parallel_layout=words), 4).layers == 3
    virtual = args(2, 8, 1, vp=2, pipeline_model_parallel_layout="Et|tt|ttt|ttL")
    assert most_held(virtual, 0).passes == 4
    with pytest.raises(ValueError, match=r"--pipeline-model-parallel-layout Ex\|tL: Invalid layer"):
        most_held(args(2, 2, 1, pipeline_model_parallel_layout="Ex|tL"), 0)


def test_layers_that_weigh_more_count_for_more():
    heavy_last = lambda layer: 10 if layer > 6 else 1  # noqa: E731
    held = most_held(args(2, 8, 1), 0, heavy_last)
    assert (held.stage, held.passes, held.weight) == (1, 4, 22)
    assert most_held(args(2, 8, 2), 0, lambda _: 3).weight == 3 * 2 * 4
    assert most_held(args(2, 8, 1), 2, heavy_last).weight == 4  # the heavy ones stay
