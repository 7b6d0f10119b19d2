"""Every config goes through profile, plan and verification: two here, all in the table."""

import re
import sys

import pytest

from tests.scripts.shell import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "benchmarks"))

import configs as benchmark
from config_predictions import stated
from lib.config import read_config
from lib.prediction import digest_of
from megatron_memo.plan.planner import Search

CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
TABLE = ROOT / "benchmarks/results/configs.csv"
SEARCH = Search(time_limit=5)
# Of the GPUs that the configs are for, less what tensors cannot have.
GIB_OF_A_GPU = 80 - 2


@pytest.fixture(scope="module")
def table():
    return benchmark.rows_of(TABLE)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_table_has_a_row_made_of_the_configs_present_content(path, table):
    row = table[path.stem]
    again = f"python benchmarks/configs.py configs/{path.name} --csv {TABLE.relative_to(ROOT)}"
    assert row["digest"] == digest_of(read_config(path)), again
    assert int(row["verified"]) == len(row["traced"].split())
    assert 0 < float(row["peak_gib"]) < GIB_OF_A_GPU
    assert float(row["bound_gib"]) <= float(row["arena_gib"])


def test_the_table_has_no_row_of_a_config_that_is_gone(table):
    assert sorted(table) == [path.stem for path in CONFIGS]


def test_the_quickstarts_config_is_profiled_planned_and_verified_as_the_table_and_it_say(table):
    path = ROOT / "configs/quickstart.yaml"
    row = benchmark.measure(read_config(path), SEARCH)
    assert row["verified"] == 1 and row["gap_bytes"] == 0
    known = table[path.stem]
    assert {name: str(row[name]) for name in ("peak_gib", "host_gib", "arena_gib")} == {
        name: known[name] for name in ("peak_gib", "host_gib", "arena_gib")
    }
    said, ratio = stated(path.read_text())
    assert ratio == row["ratio"]
    device, host = (
        float(re.search(rf"{name} +([\d.]+) MiB", said)[1]) for name in ("device", "host")
    )
    assert device == pytest.approx(float(row["peak_gib"]) * 1024, rel=1e-3)
    assert host == pytest.approx(float(row["host_gib"]) * 1024, rel=1e-3)


def test_a_model_of_several_nodes_with_fewer_layers_is_profiled_planned_and_verified(tmp_path):
    """Replicas whose buckets of gradients end within layers are among what it profiles."""
    text = (ROOT / "configs/gpt-13b-128k.yaml").read_text()
    path = tmp_path / "shorter.yaml"
    path.write_text(text.replace("--num-layers: 40", "--num-layers: 8"))
    assert path.read_text() != text and "--overlap-grad-reduce: true" in text
    row = benchmark.measure(read_config(path), SEARCH)
    assert row["ranks"] == 16 and row["verified"] == 1 and row["gap_bytes"] == 0
    assert float(row["peak_gib"]) == pytest.approx(float(row["arithmetic_gib"]), rel=0.08)
    assert float(row["native"]) >= float(row["expandable"]) >= 1
