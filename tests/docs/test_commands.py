"""Every command in the documentation is one that works."""

import pytest

from megatron_memo.platform import is_active
from tests.docs import commands, rules
from tests.docs.commands import PAGES, ROOT
from tests.docs.rules import RULES, Reader

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")


@pytest.fixture(scope="module")
def shared():
    """What several pages ask for and takes seconds."""
    return {}


@pytest.fixture
def reader(tmp_path, shared, capsys, monkeypatch):
    """In a folder with the repo's requirement files and scripts, and a dataset."""
    for path in ROOT.glob("*requirements*.txt"):
        (tmp_path / path.name).symlink_to(path)
    for name in ("pyproject.toml", "benchmarks", "docs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    typing = Reader(tmp_path, shared, capsys)
    (tmp_path / "data").mkdir()
    rules.prepare_data(typing, ["--input", "FOLDER", "--output-prefix", "data/mine"])
    return typing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_page_work(page, reader, tmp_path_factory):
    for call in commands.calls(page, RULES, tmp_path_factory.mktemp("shell")):
        try:
            reader.does(call)
        except (AssertionError, ValueError, LookupError, SystemExit) as fault:
            pytest.fail(f"{call}\n{type(fault).__name__}: {fault}")


def test_a_page_has_commands_at_all(tmp_path):
    found = commands.calls(ROOT / "docs" / "guide.md", RULES, tmp_path)
    assert {"megatron-memo", "torchrun", "pip"} <= {call.words[0] for call in found}


def test_a_program_without_a_rule_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```bash\ntorchrun a.py\npodman run\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:3: .*podman.*has no rule"):
        commands.calls(page, RULES, tmp_path / "shell")


def test_a_wrong_flag_is_an_error(reader):
    words = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt_memo.py", rules.FLAGS_OF_ANY_JOB]
    call = commands.Call("here", (*words, "--memo-swap-ration", "1"), {}, inline=False)
    with pytest.raises(ValueError, match="Did you mean --memo-swap-ratio"):
        reader.does(call)


def test_the_guides_flags_are_those_that_its_outputs_were_recorded_with(tmp_path):
    calls = commands.calls(ROOT / "docs" / "guide.md", RULES, tmp_path)
    estimate = next(call for call in calls if call.words[1] == "estimate")
    after = estimate.words[estimate.words.index("--") + 1 :]
    assert [*after] == [*rules.record.LARGE, *rules.record.AUTO]
