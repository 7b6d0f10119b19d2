"""The scripts of `megatron-memo completion`, used as a shell uses them."""

import shutil
import subprocess

import pytest

from megatron_memo import cli
from megatron_memo.completion import SHELLS


@pytest.fixture
def script(capsys, tmp_path):
    def write(shell):
        assert cli.main(["completion", shell]) == 0
        path = tmp_path / f"completion.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return write


@pytest.fixture
def completed(script, tmp_path):
    """``completed("megatron-memo pl")``: what bash offers for the last word, in a folder with a
    trace."""
    path = script("bash")
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "rank-0.trace.jsonl").touch()

    def ask(line):
        program = (
            'source "$1"\n'
            'COMP_LINE=$2; COMP_POINT=${#COMP_LINE}; read -ra COMP_WORDS <<<"$2"\n'
            '[[ $2 == *" " ]] && COMP_WORDS+=("")\n'
            "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
            "spec=$(complete -p megatron-memo); [[ $spec =~ -F\\ ([^ ]+) ]] || exit 9\n"
            "compopt() { :; }\n"  # has a meaning in an interactive shell alone
            '"${BASH_REMATCH[1]}" megatron-memo "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"\n'
            'printf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        done = subprocess.run(
            ["bash", "-c", program, "bash", str(path), line],
            capture_output=True,
            text=True,
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
        return [word.strip() for word in done.stdout.split("\n") if word.strip()]

    return ask


def test_bash_completes_commands(completed):
    assert set(completed("megatron-memo ")) >= set(cli.COMMANDS)
    assert completed("megatron-memo est") == ["estimate"]
    assert completed("megatron-memo nonsense") == []


def test_bash_completes_flags_of_the_command_at_hand(completed):
    assert completed("megatron-memo estimate --sw") == ["--sweep"]
    assert completed("megatron-memo plan --time") == ["--time-limit"]
    assert completed("megatron-memo plan --sweep") == []


def test_bash_completes_choices_and_files(completed):
    assert completed("megatron-memo completion z") == ["zsh"]
    assert completed("megatron-memo profile --device cu") == ["cuda"]
    assert "rank-0.trace.jsonl" in completed("megatron-memo diff ra")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_is_right_for_its_shell(script, shell):
    path = script(shell)
    assert "lr-scale" in path.read_text()
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    assert subprocess.run([program, "-n", path], capture_output=True).returncode == 0
