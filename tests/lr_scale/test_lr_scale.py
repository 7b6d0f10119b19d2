"""The law, what runs tell of B_noise, and the command."""

import json
import math

import pytest

from megatron_memo import cli
from megatron_memo.lr_scale.formula import relative_rate, relative_steps, relative_tokens
from megatron_memo.lr_scale.megatron_log import best_of_batches, read_log
from megatron_memo.lr_scale.noise_scale import from_rates, from_runs
from megatron_memo.lr_scale.words import parse_tokens, tokens_words

NOISE, LR_MAX = 2e6, 4e-4
BATCHES = (5e5, 1e6, 4e6, 16e6)
RATES = [(batch, LR_MAX * relative_rate(batch, NOISE)) for batch in BATCHES]
RUNS = [
    (1000 * relative_steps(batch, NOISE), 1000 * NOISE * relative_tokens(batch, NOISE))
    for batch in BATCHES
]
LINE = (
    " [2026-11-30 20:58:00.499288] iteration {step:8}/    4000 | consumed samples: {samples:12} | "
    "elapsed time per iteration (ms): 923.5 | learning rate: {rate:E} | global batch size: "
    "{batch:5} | lm loss: {loss:E} | loss scale: 1.0 | grad norm: 1.406 |\n"
)


def command(capsys, *words):
    """Status, output and errors of `megatron-memo lr-scale`."""
    status = cli.main(["lr-scale", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def log(path, rate, steps_to_three, *, batch=8, first=1, header=True):
    """A log whose loss falls along a line from 5 and is 3 at a step; every tenth step is told."""
    text = f"  seq_length {'.' * 38} 1024\n  decoder_seq_length {'.' * 30} None\n" if header else ""
    for step in range(first * 10, 2 * steps_to_three, 10):
        loss = 5 - 2 * step / steps_to_three
        text += LINE.format(step=step, samples=step * batch, rate=rate, batch=batch, loss=loss)
    path.write_text(text)
    return path


def test_the_rate_is_largest_at_the_noise_scale_and_falls_alike_to_both_sides():
    assert relative_rate(NOISE, NOISE) == 1
    assert relative_rate(NOISE / 9, NOISE) == relative_rate(NOISE * 9, NOISE)
    assert relative_rate(NOISE / 9, NOISE) == pytest.approx(0.6)


@pytest.mark.parametrize("few", [2, 3, 4])
def test_rates_and_runs_that_follow_the_law_give_its_noise_scale(few):
    for estimate in (from_rates(RATES[:few]), from_runs(RUNS[:few])):
        assert estimate.noise == pytest.approx(NOISE)
        assert estimate.misfit < 1e-9
        assert estimate.runs == few


def test_the_range_holds_every_result_that_the_spacing_allows():
    estimate = from_rates(RATES[:3], spacing=1.3)
    assert estimate.low < NOISE < estimate.high
    for signs in ((a, b, c) for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)):
        off = [(b, lr * 1.3 ** (s / 2)) for (b, lr), s in zip(RATES, signs, strict=False)]
        try:
            found = from_rates(off).noise
        except ValueError as reason:
            found = math.inf if "far below B_noise" in str(reason) else 0.0
        assert estimate.low * 0.999 <= found <= estimate.high * 1.001


def test_a_run_that_misses_the_law_shows_in_the_misfit():
    off = [*RATES[:3], (16e6, 2 * RATES[3][1])]
    assert from_rates(off).misfit > 0.15


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4194304", 2**22), ("4M", 4e6), ("4Mi", 2**22), ("128x32Ki", 2**22), ("1.5k", 1500)],
)
def test_batches_are_read_as_people_write_them(text, tokens):
    assert parse_tokens("--batch", text) == tokens


def test_batches_are_told_as_people_write_them():
    assert [tokens_words(n) for n in (2**22, 4e6, 1536, 12.0)] == ["4Mi", "4M", "1.54k", "12"]


def test_the_command_tells_the_rate_of_another_batch(capsys):
    words = [f"--rate={batch:.0f}:{rate}" for batch, rate in RATES[:2]]
    status, out, err = command(capsys, *words, "--batch", "4M", "--json")
    assert (status, err) == (0, "")
    said = json.loads(out)
    assert said["noise"] == pytest.approx(NOISE)
    assert said["lr_max"] == pytest.approx(LR_MAX)
    assert said["batches"][0]["learning_rate"] == pytest.approx(RATES[2][1])
    assert said["batches"][0]["relative_steps"] == pytest.approx(1.5)
    assert said["notes"] == []


def test_one_known_rate_is_enough_where_the_noise_scale_is_known(capsys):
    batch, rate = RATES[0]
    known = ("--noise", "2M", "--rate", f"{batch:.0f}:{rate}")
    status, out, _ = command(capsys, *known, "--batch", "1M", "--json")
    assert status == 0
    assert json.loads(out)["batches"][0]["learning_rate"] == pytest.approx(RATES[1][1])


def test_without_any_rate_it_tells_fractions_of_the_largest(capsys):
    status, out, _ = command(capsys, "--noise", "2M", "--batch", "2M", "8M")
    assert status == 0
    assert "1.000 lr_max" in out and "0.800 lr_max" in out


def test_a_batch_far_from_what_is_known_or_far_up_gets_a_note(capsys):
    rates = ("--rate", f"500k:{RATES[0][1]}", "--rate", f"1M:{RATES[1][1]}")
    _, out, _ = command(capsys, *rates, "--batch", "16M")
    assert "note: 16M tokens is more than 4 times away" in out
    assert "note: above B_noise" in out


def test_logs_of_a_scan_give_noise_scale_and_best_rates(tmp_path, capsys):
    scan = [(8, 1e-3, 500), (8, 2e-3, 400), (8, 4e-3, 600)]
    scan += [(32, 2e-3, 300), (32, 4e-3, 200), (32, 8e-3, 250)]
    paths = [
        log(tmp_path / f"{n}.log", rate, steps, batch=batch)
        for n, (batch, rate, steps) in enumerate(scan)
    ]
    best = best_of_batches([read_log(path) for path in paths], 3.0, smooth=1)
    assert [(b.batch, b.rate, b.steps) for b in best] == [(8192, 2e-3, 400), (32768, 4e-3, 200)]
    words = ["--log", *map(str, paths), "--target-loss", "3", "--smooth", "1", "--json"]
    status, out, _ = command(capsys, *words, "--batch", "32Ki")
    said = json.loads(out)
    assert status == 0 and said["notes"] == []
    # 400 = s (1 + n / 8192), 200 = s (1 + n / 32768)
    assert said["noise"] == pytest.approx(16384)
    lr_max = math.sqrt(
        math.prod(r / relative_rate(b, 16384) for b, r in [(8192, 2e-3), (32768, 4e-3)])
    )
    assert said["batches"][0]["learning_rate"] == pytest.approx(
        lr_max * relative_rate(32768, 16384)
    )


def test_a_best_rate_at_the_edge_of_its_scan_gets_a_note(tmp_path, capsys):
    paths = [log(tmp_path / "a", 1e-3, 400), log(tmp_path / "b", 1e-3, 200, batch=32)]
    _, out, _ = command(capsys, "--log", *map(str, paths), "--target-loss", "3", "--smooth", "1")
    assert out.count("none beyond it was tried") == 2


def test_a_resumed_run_counts_each_step_once(tmp_path):
    first = log(tmp_path / "first", 1e-3, 400)
    text = first.read_text()
    again = log(tmp_path / "again", 1e-3, 400, first=20, header=False).read_text()
    first.write_text(text[: len(text) // 2] + "\n" + again)
    run = read_log(first)
    assert list(run.steps) == sorted(set(run.steps))
    assert run.steps_to(3.0, smooth=1) == 400


def test_losses_are_smoothed_before_they_are_compared(tmp_path):
    path = log(tmp_path / "log", 1e-3, 400)
    lucky = LINE.format(step=105, samples=840, rate=1e-3, batch=8, loss=2.5)
    path.write_text(path.read_text() + lucky)
    run = read_log(path)
    assert run.steps_to(3.0, smooth=1) == 105
    assert run.steps_to(3.0, smooth=9) == 440


MISTAKES = {
    "nothing known": ([], "B_noise is not known: give --noise"),
    "no pair": (["--rate", "4M"], "--rate 4M: must be BATCH:LR"),
    "no rate": (["--rate", "4M:x"], "the learning rate x: must be a number above 0"),
    "no batch": (["--rate", "q:1e-4"], "the batch q: must be a number of tokens"),
    "one batch": (["--rate", "4M:1e-4", "--rate", "4M:2e-4"], "two different batches"),
    "all below": (["--rate", "1M:1e-4", "--rate", "4M:2e-4"], "Add a run at a batch above 4M"),
    "all above": (["--rate", "1M:1e-4", "--rate", "4M:1e-5"], "Add a run at a batch below 1M"),
    "two sources": (["--noise", "1M", "--run", "3:4"], "--noise and --run: each tells B_noise"),
    "no steps": (["--run", "0:5"], "the number of steps 0: must be a number above 0"),
    "runs alike": (["--run", "9:9k", "--run", "9:18k"], "Add a run at a batch below 1k"),
    "runs ahead": (["--run", "9:9k", "--run", "3:6k"], "Add a run at a batch above 2k"),
    "spacing": (["--noise", "1M", "--spacing", "2"], "--spacing 2: has an effect only where"),
    "smooth": (["--noise", "1M", "--smooth", "2"], "--smooth 2: has an effect only with --log"),
    "no target": (["--log", "x"], "Give --target-loss LOSS"),
    "no log": (["--log", "/none", "--target-loss", "3"], "--log /none: cannot be read"),
    "batch": (["--noise", "1M", "--batch", "12q"], "--batch 12q: must be a number of tokens"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_its_remedy(name, capsys):
    words, sentence = MISTAKES[name]
    status, out, err = command(capsys, *words)
    assert (status, out) == (2, "")
    assert sentence in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: "nothing", "holds no progress line"),
        (lambda text: text.replace("global batch size:     8", "global batch size:     9", 1),
         "the global batch size changes (8 to 9"),
        (lambda text: text.replace("  seq_length", "  other"), "Give --seq-length TOKENS"),
    ],
)  # fmt: skip
def test_a_log_that_tells_too_little_is_refused(tmp_path, change, sentence):
    path = log(tmp_path / "log", 1e-3, 400)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match="--log") as error:
        read_log(path)
    assert sentence in str(error.value)


def test_a_loss_out_of_reach_or_reached_at_once_is_refused(tmp_path):
    run = read_log(log(tmp_path / "log", 1e-3, 400))
    with pytest.raises(ValueError, match="no run with a batch of 8192 tokens gets there"):
        best_of_batches([run], 0.5, smooth=1)
    with pytest.raises(ValueError, match="from its first 1 logged losses on"):
        best_of_batches([run], 4.99, smooth=1)


def test_help_has_the_formula_its_source_and_its_limits(capsys):
    with pytest.raises(SystemExit):
        cli.main(["lr-scale", "--help"])
    out = capsys.readouterr().out
    for part in ("2 * lr_max / (sqrt(B_noise / B)", "2405.14578", "Limits", "not for SGD"):
        assert part in out
