"""prepare_data.py as a user runs it: round trips, restarts, refusals, and what Megatron reads."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_memo.data import build as build_module
from megatron_memo.data.cli import main
from megatron_memo.data.parts import Skip
from megatron_memo.data.tokenizer import Tokenizer, parse_tokenizer_flags

ROOT = Path(__file__).resolve().parents[2]
EOD = 256


@pytest.fixture
def corpus(tmp_path):
    """Thirty text files of 0.1 to 3 kB, UTF-8 of one to four bytes a character."""
    rng = random.Random(1)
    folder = tmp_path / "corpus"
    for index in range(30):
        path = folder / f"{index % 3}" / f"{index:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(rng.choice("abc \né€𝄞") for _ in range(rng.randint(100, 1500)))
        path.write_text(text, newline="")
    return folder


def _texts(corpus):
    return [path.read_bytes() for path in sorted(corpus.rglob("*.txt"))]


def _documents(prefix):
    """The documents of a dataset as bytes, each checked to end with its only end-of-document."""
    dataset = IndexedDataset(str(prefix))
    documents = []
    for index in range(len(dataset)):
        tokens = dataset[index]
        assert tokens[-1] == EOD
        assert np.all(tokens[:-1] < EOD)
        documents.append(tokens[:-1].astype(np.uint8).tobytes())
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return documents


def _files(prefix):
    return {kind: Path(f"{prefix}.{kind}").read_bytes() for kind in ("bin", "idx")}


def _fails(capsys, *words):
    """Runs with flags that must be refused; returns the message, which has to be one paragraph."""
    assert main(list(map(str, words))) == 2
    _, label, message = capsys.readouterr().err.rpartition("prepare_data.py: error: ")
    assert label
    assert len(message.strip().splitlines()) == 1
    return message


def test_decoding_gives_the_input_back(corpus, tmp_path, capsys):
    prefix = tmp_path / "out" / "data"
    assert main(["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]) == 0
    assert _documents(prefix) == _texts(corpus)
    assert sorted(os.listdir(prefix.parent)) == ["data.bin", "data.idx", "data.json"]
    out = capsys.readouterr().out
    assert f"30 documents, {sum(len(text) + 1 for text in _texts(corpus)):,} tokens" in out
    assert f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 257" in out


def test_the_printed_flags_mean_the_ids_that_were_written():
    values = dict(tokenizer_type="NullTokenizer", vocab_size=257, pad_vocab_size=True, rank=1)
    values |= dict(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2)
    args = SimpleNamespace(**values)
    tokenizer = build_tokenizer(args)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, EOD)
    assert args.padded_vocab_size == 512


def test_joined_documents_hold_neighbouring_files_in_order(corpus, tmp_path):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--document-tokens", "4000"]
    assert main([*words, "--workers", "1"]) == 0
    documents = _documents(prefix)
    assert 1 < len(documents) < 20
    assert all(len(document) + 1 >= 4000 for document in documents)
    assert b"".join(documents) == b"".join(_texts(corpus))


def test_short_documents_are_left_out_and_counted(corpus, tmp_path, capsys):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    assert main([*words, "--min-document-tokens", "1500"]) == 0
    long = [text for text in _texts(corpus) if len(text) + 1 >= 1500]
    assert _documents(prefix) == long
    assert f"Left out {30 - len(long)} documents below" in capsys.readouterr().out


def test_jsonl_lines_become_documents(tmp_path):
    texts = [f"line {n} é\n\n" * (n % 7 + 1) for n in range(200)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prefix = tmp_path / "data"
    words = ["--input", str(path), "--output-prefix", str(prefix), "--workers", "1"]
    assert main([*words, "--part-mib", "0.001"]) == 0
    assert _documents(prefix) == [text.encode() for text in texts]


def test_stock_megatron_reads_samples_of_the_length_asked_for(corpus, tmp_path):
    prefix = tmp_path / "data"
    assert main(["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]) == 0
    tokenizer = build_tokenizer(
        SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=257, pad_vocab_size=False)
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=512,
        blend=([str(prefix)], None),
        split="90,10,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(
        GPTDataset, [40, 2, None], lambda: True, config
    ).build()
    assert test is None
    assert len(train) >= 40
    assert len(valid) >= 2
    for index in range(40):
        sample = train[index]
        assert sample["tokens"].shape == sample["labels"].shape == (512,)
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
        assert 0 <= int(sample["tokens"].min()) <= int(sample["tokens"].max()) <= EOD
        assert float(sample["loss_mask"].sum()) == 512


def test_the_result_does_not_depend_on_workers_or_parts(corpus, tmp_path):
    results = []
    for number, extra in enumerate((["1"], ["2", "--part-mib", "0.002"], ["1", "--part-mib", "1"])):
        prefix = tmp_path / f"data{number}"
        words = ["--input", str(corpus), "--output-prefix", str(prefix)]
        assert main([*words, "--document-tokens", "3000", "--workers", *extra]) == 0
        results.append(_files(prefix))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_killed_in_the_middle_goes_on_and_ends_with_the_same_bytes(tmp_path, workers):
    folder = tmp_path / "in"
    folder.mkdir()
    rng = random.Random(2)
    for index in range(600):
        (folder / f"{index:03d}.txt").write_text(str(rng.random()) * rng.randint(1, 400))
    words = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "--input", str(folder)]
    words += ["--workers", str(workers), "--part-mib", "0.003", "--document-tokens", "5000"]

    whole = tmp_path / "whole"
    assert main([*words[2:], "--output-prefix", str(whole)]) == 0

    killed = tmp_path / "killed"
    parts = Path(f"{killed}.parts")
    run = subprocess.Popen(
        [*words, "--output-prefix", str(killed)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while run.poll() is None and len(list(parts.glob("0*.json"))) < 5:
        time.sleep(0.002)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert not Path(f"{killed}.idx").exists()
    assert 5 <= len(list(parts.glob("0*.json"))) < 600

    again = subprocess.run(
        [*words, "--output-prefix", str(killed)], check=True, capture_output=True, text=True
    )
    assert "documents" in again.stdout
    assert _files(killed) == _files(whole)
    assert not parts.exists()


def test_finished_parts_are_not_done_again(corpus, tmp_path, monkeypatch):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    words += ["--part-mib", "0.002"]
    done = []
    run_part = build_module._Job.run_part

    def stops_after_four(job, number, tokenizer):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(number)
        return run_part(job, number, tokenizer)

    monkeypatch.setattr(build_module._Job, "run_part", stops_after_four)
    assert main(words) == 130
    assert not Path(f"{prefix}.idx").exists()
    monkeypatch.setattr(
        build_module._Job,
        "run_part",
        lambda job, number, tokenizer: done.append(number) or run_part(job, number, tokenizer),
    )
    assert main(words) == 0
    assert sorted(done) == list(range(len(done)))
    assert _documents(prefix) == _texts(corpus)


def test_a_full_disk_leaves_the_finished_parts(corpus, tmp_path, monkeypatch, capsys):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    words += ["--part-mib", "0.002"]
    run_part = build_module._Job.run_part

    def full(job, number, tokenizer):
        if number == 3:
            raise OSError(28, "No space left on device")
        return run_part(job, number, tokenizer)

    with monkeypatch.context() as patch:
        patch.setattr(build_module._Job, "run_part", full)
        assert "No space is left for --output-prefix" in _fails(capsys, *words)
    assert not Path(f"{prefix}.idx").exists()
    assert main(words) == 0
    assert _documents(prefix) == _texts(corpus)


def test_a_disk_that_is_too_small_is_refused_before_the_work(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    prefix = tmp_path / "data"
    message = _fails(capsys, "--input", corpus, "--output-prefix", prefix)
    assert "are needed" in message
    assert os.listdir(tmp_path) == ["corpus"]


def test_the_same_command_again_does_nothing(corpus, tmp_path, capsys):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    assert main(words) == 0
    before = os.stat(f"{prefix}.bin").st_mtime_ns
    capsys.readouterr()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "up to date" in out
    assert "--data-path" in out
    assert os.stat(f"{prefix}.bin").st_mtime_ns == before


def test_a_dataset_of_other_input_is_replaced_only_on_demand(corpus, tmp_path, capsys):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    assert main(words) == 0
    (corpus / "0" / "00.txt").write_text("changed")
    before = _files(prefix)
    message = _fails(capsys, *words)
    assert f"--output-prefix {prefix}" in message
    assert "--overwrite" in message
    assert _files(prefix) == before
    assert main([*words, "--overwrite"]) == 0
    assert _documents(prefix) == _texts(corpus)


def test_parts_of_another_plan_are_not_mixed_in(corpus, tmp_path, capsys):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    parts = Path(f"{prefix}.parts")
    parts.mkdir()
    (parts / "plan.json").write_text('{"plan": "another"}')
    assert "unfinished run with other input" in _fails(capsys, *words)
    assert main([*words, "--overwrite"]) == 0
    assert _documents(prefix) == _texts(corpus)


@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_a_kill_while_publishing_is_made_good(corpus, tmp_path, monkeypatch, renames):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    publish = build_module.WorkDir.publish

    def cut_off(work, files):
        monkeypatch.setattr(shutil, "rmtree", _interrupt)
        publish(work, list(files)[:renames])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_module.WorkDir, "publish", cut_off)
        assert main(words) == 130
    monkeypatch.undo()
    assert Path(f"{prefix}.idx").exists() == (renames == 3)
    assert main(words) == 0
    assert _documents(prefix) == _texts(corpus)
    assert not Path(f"{prefix}.parts").exists()


def _interrupt(*_):
    raise KeyboardInterrupt


def test_overwrite_goes_on_with_parts_of_the_same_plan(corpus, tmp_path, monkeypatch):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_join", _interrupt)
        assert main(words) == 130
    with monkeypatch.context() as patch:
        patch.setattr(build_module._Job, "run_part", _interrupt)
        assert main([*words, "--overwrite"]) == 0
    assert _documents(prefix) == _texts(corpus)


def test_two_runs_at_one_prefix_do_not_mix(corpus, tmp_path, capsys):
    prefix = tmp_path / "data"
    with build_module.WorkDir(str(prefix), "other"):
        message = _fails(capsys, "--input", corpus, "--output-prefix", prefix)
    assert "another run is preparing it right now" in message


def test_files_that_are_no_text_are_named_and_counted(corpus, tmp_path, capsys):
    (corpus / "picture.txt").write_bytes(b"\x89PNG\0\0")
    (corpus / "latin.txt").write_bytes(b"caf\xe9")
    (corpus / "empty.txt").write_bytes(b"")
    prefix = tmp_path / "data"
    assert main(["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "Left out 1 binary files:\n    picture.txt" in out
    assert "Left out 1 files that are not in the given encoding:\n    latin.txt: byte 3" in out
    assert "Left out 1 empty files or lines:\n    empty.txt" in out
    assert len(_documents(prefix)) == 30


def test_input_without_any_text_writes_nothing(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"\0\0")
    (tmp_path / "b.txt").write_bytes(b"")
    message = _fails(capsys, "--input", tmp_path, "--output-prefix", tmp_path / "data")
    assert "no text to train on: skipped 1 binary, 1 empty (a.txt" in message
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seq-length", "100000"], "do not fill one sample of --seq-length 100000"),
        (["--seq-length", "1000"], "the shortest document has"),
        (["--seq-length", "5000"], "even the longest document has"),
        (["--seq-length", "5000", "--document-tokens", "5001"], None),
    ],
)
def test_documents_shorter_than_the_context_are_warned_about(
    corpus, tmp_path, capsys, words, expected
):
    prefix = tmp_path / "data"
    base = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    assert main([*base, *words]) == 0
    out = capsys.readouterr().out
    assert expected in out if expected else "Warning" not in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--workers", "0"], "--workers 0 is too small"),
        (["--document-tokens", "0"], "--document-tokens 0 is too small"),
        (["--part-mib", "0"], "--part-mib 0.0 is too small"),
        (["--part-mib", "inf"], "--part-mib inf: has to be a number"),
        (["--part-mib", "nan"], "--part-mib nan"),
        (["--encoding", "utf-9"], "--encoding utf-9 is no encoding"),
        (["--min-document-tokens", "999999"], "all 30 documents are shorter than"),
        (["--suffix", ".rs"], "no file to read with --suffix .rs"),
        (["--colour"], "--colour: neither a flag of prepare_data.py"),
        (["--vocab-file", "x"], "without --tokenizer-type"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "300"], "--vocab-size 300"),
        (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "gone"], "--vocab-file gone"),
        (
            ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "gone"],
            "can not build the tokenizer",
        ),
        (["--tokenizer-type", "SentencePieceTokenizer"], "can not build the tokenizer"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(corpus, tmp_path, capsys, words, expected):
    message = _fails(capsys, "--input", corpus, "--output-prefix", tmp_path / "data", *words)
    assert expected in message
    assert os.listdir(tmp_path) == ["corpus"]


def test_an_output_that_no_folder_can_hold_is_refused(corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    prefix = tmp_path / "file" / "data"
    assert "is not a folder" in _fails(capsys, "--input", corpus, "--output-prefix", prefix)


@pytest.mark.parametrize("end", ["/", "/.", "/sub/.."])
def test_a_folder_as_prefix_is_refused_with_a_name_in_it(corpus, tmp_path, capsys, end):
    prefix = f"{tmp_path}{end}"
    message = _fails(capsys, "--input", corpus, "--output-prefix", prefix)
    assert f"--output-prefix {prefix}: names a folder" in message
    assert os.path.join(prefix, "data") in message
    assert os.listdir(tmp_path) == ["corpus"]


def test_one_file_is_one_file(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    words = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "data")]
    assert main([*words, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "Reading 1 file, 0.0 MB, with 1 process\n" in out
    assert "1 document, 5 tokens" in out


def test_what_training_needs_besides_the_data_is_said(corpus, tmp_path, capsys):
    words = ["--input", str(corpus), "--output-prefix", str(tmp_path / "data"), "--workers", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "--eval-interval N" in out and "--eval-iters 0" in out


@pytest.fixture
def two_workers(corpus, tmp_path):
    """A run that has just begun with two workers, in a process group of its own."""
    words = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "--input", str(corpus)]
    words += ["--output-prefix", str(tmp_path / "data"), "--part-mib", "0.002", "--workers", "2"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = subprocess.Popen(words, **pipes, start_new_session=True)
    assert run.stdout.readline().startswith("Reading 30 files")
    yield run
    if run.poll() is None:
        run.kill()
    run.wait()


def _worker_ids(run):
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    if not children.exists():
        pytest.skip("this system does not list a process's children")
    return [
        int(child)
        for child in children.read_text().split()
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_workers_do_not_hear_ctrl_c_from_their_first_moment(two_workers):
    workers = []
    while not workers and two_workers.poll() is None:
        workers = _worker_ids(two_workers)
    for worker in workers:
        os.kill(worker, signal.SIGINT)
    out, _ = two_workers.communicate(timeout=60)
    assert workers
    assert "Traceback" not in out
    assert two_workers.returncode == 0


def test_ctrl_c_stops_a_run_and_its_workers_without_a_traceback(two_workers):
    # A terminal sends it to the whole group.
    os.killpg(two_workers.pid, signal.SIGINT)
    out, _ = two_workers.communicate(timeout=60)
    assert "Traceback" not in out
    assert "Stopped. What is finished stays" in out
    assert two_workers.returncode == 130


def test_the_flags_of_a_byte_level_run_are_accepted(corpus, tmp_path):
    prefix = tmp_path / "data"
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--workers", "1"]
    assert main([*words, "--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]) == 0
    assert _documents(prefix) == _texts(corpus)


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory):
    """A SentencePiece model of 400 pieces, trained here on a few lines."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text().splitlines()),
        model_prefix=str(folder / "model"),
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
    )
    return folder / "model.model"


def test_a_megatron_tokenizer_is_used_by_megatrons_own_flags(tmp_path, sentencepiece_model, capsys):
    texts = ["def test(corpus):\n    assert corpus", "the flags of a run", "é"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    flags.append(str(sentencepiece_model))
    prefix = tmp_path / "data"
    words = ["--input", str(tmp_path), "--output-prefix", str(prefix), "--workers", "1"]
    assert main([*words, *flags]) == 0
    assert f"--data-path {prefix} {' '.join(flags)}" in capsys.readouterr().out

    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    dataset = IndexedDataset(str(prefix))
    for index, text in enumerate(texts):
        assert dataset[index].tolist() == [*processor.encode(text), processor.eos_id()]


def test_a_worker_builds_the_same_tokenizer_from_what_it_is_sent(sentencepiece_model):
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model"]
    sent = parse_tokenizer_flags([*flags, str(sentencepiece_model)])
    received = pickle.loads(pickle.dumps(sent))
    assert received == sent
    assert received.build().encode("corpus").tolist() == sent.build().encode("corpus").tolist()


@pytest.mark.parametrize("vocab_size", [257, 65499, 65500, 128256])
def test_ids_are_stored_in_the_type_that_upstream_chooses(vocab_size):
    ours = Tokenizer(encode=lambda text: np.zeros(1), vocab_size=vocab_size, eod=0)
    assert ours.dtype is DType.optimal_dtype(vocab_size)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    work = build_module.WorkDir(str(tmp_path / "data"), "plan")
    with work, pytest.raises(ValueError, match=r"the id 70000, beyond the vocabulary"):
        work.write_part(0, [np.array([1, 70000])], build_module.PartReport(), "uint16")
    assert not work.is_done(0)


def test_a_part_names_only_the_first_few_of_what_it_skips():
    report = build_module.PartReport()
    for number in range(100):
        report.skip(Skip(f"line {number}", "json"))
    assert report.skipped == {"json": 100}
    assert [skip.where for skip in report.examples] == ["line 0", "line 1", "line 2"]


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--input", "--output-prefix", "--document-tokens", "--tokenizer-type"):
        assert flag in out
