"""Generated pages have everything that they are generated from, and what they claim is there."""

import argparse
import ast
from functools import cache

import pytest

import memo_compatibility
import memo_flags
from megatron_memo.arguments import add_memo_arguments
from megatron_memo.cli import COMMANDS
from megatron_memo.refusals import REFUSALS
from memo_faults import FAULTS
from memo_results import result
from memo_text import prose
from memo_works import WORKS
from tests.docs.commands import ROOT


@cache
def functions_in(path):
    """Names of the functions in a file, those within classes too."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", [*WORKS, *FAULTS], ids=lambda row: row.what)
def test_what_works_is_shown_by_tests_that_are_there(row):
    assert row.tests
    for name in row.tests:
        path, _, function = name.partition("::")
        assert function in functions_in(path), name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_command_is_on_the_page(name):
    page, parser = f"{memo_flags.commands()}\n", memo_flags.command_parser(name)
    for each in [parser, *memo_flags.kinds(parser)]:
        section = page.split(f"# {each.prog}\n")[1].split("\n###")[0]
        for action in memo_flags.shown(each):
            for flag in action.option_strings or [memo_flags.heading(action)]:
                assert f"{{option}} {flag}" in section or f", {flag}" in section, flag


def test_kinds_of_a_command_are_sections_of_their_own():
    parser = argparse.ArgumentParser(prog="megatron-memo draw", description="Draw.")
    parser.add_subparsers().add_parser("plan", description="One.").add_argument("--wide")
    page = memo_flags._section(parser, "###")
    assert "\n#### megatron-memo draw plan\n\nOne." in page
    assert "{option} --wide WIDE" in page


def test_every_memo_flag_of_the_launcher_is_on_the_page():
    parser, page = argparse.ArgumentParser(add_help=False), memo_flags.launcher_flags()
    add_memo_arguments(parser)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    assert "--memo-swap-ratio" in flags
    for flag in flags:
        assert f"::::{{option}} {flag}" in page, flag


def test_every_refusal_is_on_the_page_with_reason_and_remedy():
    page = memo_compatibility.refusals()
    for row in REFUSALS:
        rows = [part for part in page.split("\n* - ") if row.flag in part]
        assert any(prose(row.reason) in part and prose(row.remedy) in part for part in rows)


def test_sentences_of_the_code_are_no_markup_by_accident():
    assert prose("a*b_c [x](y) <z> `code` --flag|R $1") == (
        "a\\*b\\_c \\[x\\](y) \\<z\\> `code` `--flag`\\|R \\$1"
    )


def test_a_table_of_results_has_its_command_and_every_row():
    page = result("auto_ratio.csv")
    lines = (ROOT / "benchmarks/results/auto_ratio.csv").read_text().splitlines()
    assert lines[0].removeprefix("# ") in page
    assert page.count("\n* - ") == len([line for line in lines if not line.startswith("#")])


def test_a_column_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="has no column watts"):
        result("auto_ratio.csv", "ratio watts")
