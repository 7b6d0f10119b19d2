"""Other versions of megatron-core than the one that is installed, each in an environment of links.

These are the newest of each minor version below it; MEMO_TEST_VERSIONS names others, as
scripts/test_versions.sh does, which also runs the layer's and swapping's own tests in them.
"""

import json
import os
import socket

import pytest

from tests.launch.conftest import LAUNCHER, PLAIN_KERNELS, TINY
from tests.versions.conftest import ROOT

VERSIONS = os.environ.get("MEMO_TEST_VERSIONS", "0.16.1 0.17.1 0.18.2").split()
WITH_TRAINING = [version for version in VERSIONS if version >= "0.17"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_layer_is_bitwise_stock_and_its_chunks_are_bitwise_kept_ones(version, run, last_line):
    found = last_line(run(version, ROOT / "tests/versions/one_block.py"))
    assert found["version"] == version
    assert found["swapped"]["differing"] == []
    assert found["recomputed"]["differing"] == []
    assert found["both"]["differing"] == []
    if "by function" in found:  # before 0.19
        assert found["by function"] == ["MemoTransformerLayer"] * 3
    # The layer's input and its attention output go to the host whatever is recomputed.
    assert 0 < found["recomputed"]["moved"] < found["both"]["moved"] < found["swapped"]["moved"]


def one_process():
    """Variables of a distributed run with one rank, without a launcher's seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1") | {
        "MASTER_PORT": str(port)
    }


@pytest.mark.parametrize("version", WITH_TRAINING)
def test_the_launcher_trains_with_the_versions_own_loop(version, run, tmp_path):
    report = tmp_path / "report.json"
    words = [LAUNCHER, *TINY["llama"], *PLAIN_KERNELS, "--train-iters", "2"]
    words += ["--memo-swap-ratio", "0.5", "--memo-resident-layers", "0", "--memo-report", report]
    done = run(version, *words, **one_process())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(report.read_text())
    assert found["versions"]["megatron-core"] == version
    first, second = (row["lm_loss"] for row in found["iterations"])
    assert 0 < second < first < 6  # ln 128 is 4.9, and two steps go down
    assert found["swap"]["d2h_bytes"] > 0 and found["swap"]["h2d_bytes"] > 0


@pytest.mark.parametrize("version", [v for v in VERSIONS if v < "0.17"])
def test_a_wheel_without_training_is_refused_with_what_to_do(version, run):
    done = run(version, LAUNCHER, "--memo-swap-ratio", "0.5", **one_process())
    assert done.returncode == 2
    assert f"error: megatron-core {version}: comes without megatron.training" in done.stderr
    assert "Traceback" not in done.stderr
