"""From a config and flags to the command that is run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.shell import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import train
from lib.config import read_config

CONFIG = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
LAUNCH:
  NODES: 1
  RANKS_PER_NODE: 4
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --bf16: false
  --lr: 1.0e-3
  --data-path: [0.3, first, 0.7, "second one"]
  --save: $RUNS/run
"""
FLAGS = [
    *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--lr", "0.001"),
    *("--data-path", "0.3", "first", "0.7", "second one", "--save", "/runs/run"),
]
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", *SLURM):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNS", "/runs")
    path = tmp_path / "model.yaml"
    path.write_text(CONFIG)
    return path


def printed(capsys, *words):
    """The words that `--dry-run` prints, as a shell reads them."""
    assert train.main([*map(str, words), "--dry-run"]) == 0
    return shlex.split(capsys.readouterr().out)


def refused(capsys, *words):
    """What is said of a mistake."""
    assert train.main([*map(str, words), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def flags_of(words):
    return words[words.index(str(train.SCRIPT)) + 1 :]


def test_on_one_node_it_is_torchrun_with_the_configs_flags_and_variables(config, capsys):
    words = printed(capsys, config)
    assert words[:2] == ["CUDA_DEVICE_MAX_CONNECTIONS=1", "OMP_NUM_THREADS=1"]
    assert words[2:8] == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "4"),
    ]
    assert flags_of(words) == FLAGS


def test_extra_flags_replace_those_of_the_config_and_others_follow(config, capsys):
    words = printed(capsys, config, "--lr", "2", "--data-path=mine", "--exit-interval", "3")
    kept = FLAGS[:3] + FLAGS[-2:]
    assert flags_of(words) == [*kept, "--lr", "2", "--data-path=mine", "--exit-interval", "3"]


def test_a_flag_of_the_config_can_be_left_out(config, capsys):
    words = printed(capsys, config, "--without", "sequence-parallel", "--without=--save")
    assert not {"--sequence-parallel", "--save"} & set(words)
    assert "--without" not in words


def test_the_environment_goes_before_the_configs_variables(config, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert printed(capsys, config)[0] == "OMP_NUM_THREADS=1"


def test_several_nodes_meet_at_the_given_address(config, capsys):
    words = printed(capsys, config, "--nodes", "2", "--rdzv", "alpha:29500")
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--rdzv-endpoint") + 1] == "alpha:29500"
    assert "--standalone" not in words


def test_under_srun_it_is_the_rank_that_slurm_says(config, capsys, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    words = printed(capsys, config, "--slurm")
    assert {"RANK=5", "LOCAL_RANK=1", "WORLD_SIZE=8"} < set(words)
    assert words[-len(FLAGS) - 2 :] == [sys.executable, str(train.SCRIPT), *FLAGS]


def test_what_is_printed_is_what_is_run(config, tmp_path):
    """The command goes through a shell and through exec; both reach the script alike."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['LOCAL_RANK'], *sys.argv[1:], sep='|')\n")
    command = [sys.executable, str(ROOT / "scripts/train.py"), str(config), "--slurm"]
    command += ["--script", str(script), "--a", "two words", "--b", "$HOME"]
    env = {**os.environ, **SLURM}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.rstrip("\n").split("|") == ["1", *FLAGS, "--a", "two words", "--b", "$HOME"]
    shown = subprocess.run(
        [*command, "--dry-run"], env=env, capture_output=True, text=True, check=True
    )
    again = subprocess.run(
        shown.stdout, env=env, shell=True, capture_output=True, text=True, check=True
    )
    assert again.stdout == run.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks-per-node", "3"], "3 ranks do not divide by 2 (--tensor-model-parallel-size 2)"),
        (["--tensor-model-parallel-size", "3"], "(--tensor-model-parallel-size 3)"),
        (["--context-parallel-size=8"], "do not divide by 16"),
        (["--tensor-model-parallel-size", "x"], "x: must be a whole number"),
        (["--nodes", "2"], "the same --rdzv HOST:PORT"),
        (["--nodes", "2", "--rdzv", "alpha"], "--rdzv alpha: must be HOST:PORT"),
        (["--rdzv", "alpha:1"], "is for several nodes"),
        (["--without", "bf17"], "has no --bf17"),
        (["--slurm"], "SLURM_PROCID is not set"),
        (["--slurm", "--nodes", "2"], "takes nodes, ranks and addresses from srun"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_remedy(config, capsys, words, sentence):
    assert sentence in refused(capsys, config, *words)


def test_srun_without_a_meeting_place_is_refused(config, capsys, monkeypatch):
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "1")
    assert "MASTER_ADDR is not set" in refused(capsys, config, "--slurm")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "the file must hold lines of the form"),
        ("A: [", "is not YAML"),
        ("ENV_VARS: {}", "MODEL_ARGS is missing"),
        ("MODEL_ARGS: {}\nMODEL_ARG: {}", "the file: MODEL_ARG: is not known"),
        ("MODEL_ARGS: {lr: 1}", "MODEL_ARGS: lr: is no flag. Write --lr."),
        ("MODEL_ARGS: {--lr: }", "MODEL_ARGS: --lr: has no value. Write true"),
        ("MODEL_ARGS: {--lr: {a: 1}}", "MODEL_ARGS: --lr: cannot be"),
        ("MODEL_ARGS:\n  --lr: 1\n  --lr: 2", "--lr is there twice"),
        ("MODEL_ARGS: {--save: $NOWHERE_SET}", "the environment has no NOWHERE_SET"),
        ("MODEL_ARGS: {}\nLAUNCH: {NODES: two}", "LAUNCH: NODES: 'two' must be a whole number"),
        ("MODEL_ARGS: {}\nLAUNCH: {NODE: 2}", "LAUNCH: NODE: is not known"),
        ("MODEL_ARGS: {}\nENV_VARS: {1: 2}", "ENV_VARS: 1: is no name"),
    ],
)
def test_a_damaged_config_is_named_with_key_and_remedy(tmp_path, content, sentence):
    path = tmp_path / "model.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^{path}: ") as error:
        read_config(path, env={})
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ([], 0, "gpt-7b-1m.yaml: the flags are right, for 8 ranks"),
        (["--no-such-flag"], 2, "unrecognized arguments: --no-such-flag"),
        (["--fp8-format", "hybrid"], 2, "--fp8-format hybrid"),
    ],
)
def test_a_check_parses_the_flags_as_the_run_will_and_starts_nothing(words, status, sentence):
    command = [sys.executable, str(ROOT / "scripts/train.py"), str(ROOT / "configs/gpt-7b-1m.yaml")]
    run = subprocess.run(
        [*command, "--mock-data", *words, "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == status and sentence in (run.stderr if status else run.stdout)
    assert "Traceback" not in run.stderr and (run.stdout == "") == (status == 2)


def test_a_config_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="/none: cannot be read"):
        read_config(Path("/none"))


def test_without_a_config_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--dry-run"])
    assert end.value.code == 2
    assert "CONFIG is missing" in capsys.readouterr().err
