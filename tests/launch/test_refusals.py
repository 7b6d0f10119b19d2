"""Every row of the table of refusals, through Megatron's own parser."""

import argparse
import re

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_memo import platform
from megatron_memo.arguments import add_memo_arguments
from megatron_memo.config import MemoConfig
from megatron_memo.refusals import REFUSALS, Scope, check_supported, refused

MEMO = MemoConfig(swap_ratio=0.5)
QUIET = ["--transformer-impl", "local", "--attention-dropout", "0"]
WITH_EXAMPLE = [row for row in REFUSALS if row.example]


@pytest.fixture(scope="module")
def parse():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_memo_arguments(add_megatron_arguments(parser))
    return lambda *words: parser.parse_args([*QUIET, *words])


def applies(row):
    return platform.is_active() or not row.on_cpu_only


def test_plain_flags_are_refused_nowhere(parse):
    check_supported(parse(), MEMO)
    check_supported(parse(), None)


def test_missing_attributes_count_as_switched_off():
    check_supported(argparse.Namespace(), MEMO)


@pytest.mark.parametrize("row", WITH_EXAMPLE, ids=lambda row: row.attribute)
def test_example_is_refused_by_its_row_alone(parse, row):
    if not applies(row):
        pytest.skip("a limit of the CPU platform")
    args = parse(*row.example.split())
    named = {found.attribute for found in refused(args, MEMO)}
    assert row.attribute in named
    # Some examples need a companion flag that is refused too, never an unrelated one.
    assert all(
        found == row.attribute or found in str(row.example).replace("-", "_") for found in named
    )


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.attribute)
def test_paragraph_names_flag_limit_and_remedy(parse, row):
    if not applies(row):
        pytest.skip("a limit of the CPU platform")
    args = parse(*row.example.split())
    if not row.example:  # an attribute that only other code sets
        setattr(args, row.attribute, True)
    with pytest.raises(ValueError) as error:
        check_supported(args, MEMO)
    paragraphs = str(error.value).split("\n\n")
    mine = next(text for text in paragraphs if text.startswith(row.flag))
    assert row.reason in mine
    assert mine.endswith(row.remedy)
    assert "\n" not in mine


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.attribute)
def test_rows_read_as_sentences(row):
    assert row.remedy.endswith(".")
    assert re.match(r"[a-z]", row.reason)
    assert not row.reason.endswith(".")


@pytest.mark.parametrize("row", WITH_EXAMPLE, ids=lambda row: row.attribute)
def test_without_a_ratio_only_what_concerns_our_modules_is_refused(parse, row):
    if not applies(row):
        pytest.skip("a limit of the CPU platform")
    args = parse(*row.example.split())
    found = {match.attribute for match in refused(args, None)}
    assert found == (set() if row.scope is Scope.LAYER else {row.attribute})


def test_transformer_engines_attention_is_not_held_to_our_limits(parse):
    args = parse("--transformer-impl", "transformer_engine", "--window-size", "128,0")
    check_supported(args, MEMO)


def test_no_attribute_has_two_rows():
    attributes = [row.attribute for row in REFUSALS]
    assert len(attributes) == len(set(attributes))


def test_every_attribute_is_one_that_megatron_parses(parse):
    args = parse()
    # Set by code: ModelOpt's switch, and what validation derives from --cpu-offloading-num-layers.
    derived = {"modelopt_enabled", "cpu_offloading"}
    for row in REFUSALS:
        assert hasattr(args, row.attribute) or row.attribute in derived, row.attribute
