"""The profiled command line: nothing is read, written or evaluated, all else stays."""

from megatron_memo.profile.words import profiled_words


def test_files_are_left_out_and_shapes_stay():
    given = (
        "--num-layers 2 --data-path 0.3 a 0.7 b --save out --save-interval 5 --load in "
        "--tensorboard-dir=board --bf16 --eval-interval 10 --memo-swap-ratio 0.5"
    )
    words = profiled_words(given.split())
    text = " ".join(words)
    assert text.startswith("--num-layers 2 --bf16 --memo-swap-ratio 0.5 ")
    assert not {"a", "out", "in", "--load", "--tensorboard-dir=board", "10"} & set(words)
    assert "--fake-process-group" in words and "--mock-data" in words


def test_steps_are_added_only_where_none_are_given():
    assert "--train-iters" in profiled_words(["--bf16"])
    given = profiled_words(["--train-samples", "100", "--lr-decay-samples", "90"])
    assert "--train-iters" not in given and "--lr-decay-samples" in given


def test_nothing_is_put_in_twice():
    words = profiled_words(["--mock-data", "--num-workers", "4", "--dataloader-type", "cyclic"])
    assert [words.count(f) for f in ("--mock-data", "--num-workers", "--dataloader-type")] == [
        1
    ] * 3


def test_a_run_of_a_few_iterations_is_profiled_as_well():
    words = profiled_words(["--train-iters", "2", "--bf16"])
    assert words.count("--train-iters") == 1 and "2" not in words
