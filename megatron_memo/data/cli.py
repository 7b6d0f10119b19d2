"""``prepare_data.py``: flags, messages, exit status."""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
from collections.abc import Sequence

from tqdm import tqdm

from megatron_memo.data.build import build
from megatron_memo.data.options import BuildOptions
from megatron_memo.data.parts import ReadOptions
from megatron_memo.data.preflight import check_prefix
from megatron_memo.data.record import Summary, fingerprint, up_to_date
from megatron_memo.data.sources import Source, find_sources
from megatron_memo.data.tokenizer import parse_tokenizer_flags
from megatron_memo.data.workdir import remove_leftover

# What the summary says of pieces that gave no tokens, or not the tokens they should.
_WHY = {
    "binary": "Left out {} binary files",
    "encoding": "Left out {} files that are not in the given encoding",
    "empty": "Left out {} empty files or lines",
    "json": "Left out {} lines without a text",
    "replaced": "Replaced wrong bytes in {} files or lines",
}


def make_parser() -> argparse.ArgumentParser:
    """Our flags; Megatron's tokenizer flags are parsed by Megatron's own group afterwards."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description="Turns text files, folders of them, or .jsonl files into Megatron's indexed "
        "dataset: PREFIX.bin and PREFIX.idx, which any Megatron reads as --data-path PREFIX. A "
        "run that was killed goes on where it ended when the same command is given again.",
        epilog="Without a tokenizer flag the text is stored as bytes. With --tokenizer-type, any "
        "tokenizer that Megatron knows is used, by Megatron's own flags: --tokenizer-type "
        "SentencePieceTokenizer --tokenizer-model FILE, --tokenizer-type HuggingFaceTokenizer "
        "--tokenizer-model FOLDER, --tokenizer-type GPT2BPETokenizer --vocab-file FILE "
        "--merge-file FILE, and so on. The flags to train with are printed at the end.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="Text files, .jsonl files (one "
        "JSON object with a text on each line) and folders, which are searched to any depth.",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="Path of the dataset without "
        ".bin and .idx; this is what --data-path takes. Folders on the way are made.",
    )
    add(
        "--suffix",
        action="append",
        default=[],
        metavar=".EXT",
        help="Read only files of a "
        "folder whose name ends like this, as .py; may be given several times.",
    )
    add(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="Leave out files and "
        "folders whose name, or path below the input folder, matches this shell pattern; may be "
        "given several times.",
    )
    add(
        "--document-tokens",
        type=int,
        default=None,
        metavar="N",
        help="Join neighbouring files, "
        "in sorted order, until a document has at least N tokens, so that one sample of a long "
        "context is one document. Without it each file is a document.",
    )
    add(
        "--min-document-tokens",
        type=int,
        default=1,
        metavar="N",
        help="Leave out documents with fewer than N tokens; how many is said at the end.",
    )
    add(
        "--seq-length",
        type=int,
        default=None,
        metavar="N",
        help="The context you will train with. Only used to warn about documents that are shorter.",
    )
    add(
        "--text-key",
        default="text",
        metavar="KEY",
        help='Key of the text in a line of a .jsonl file (default "text").',
    )
    add(
        "--encoding",
        default="utf-8",
        metavar="NAME",
        help="Encoding of text files (default utf-8).",
    )
    add(
        "--bad-encoding",
        choices=("skip", "replace", "stop"),
        default="skip",
        help="What to do "
        "with a file that is not in that encoding: leave it out, replace the wrong bytes by "
        "U+FFFD, or stop. The first two are counted and named at the end (default skip).",
    )
    add(
        "--workers",
        type=int,
        default=None,
        metavar="N",
        help="Processes that tokenize at the "
        "same time; the result does not depend on it (default: one for each core, 16 at most).",
    )
    add(
        "--part-mib",
        type=float,
        default=8.0,
        metavar="MIB",
        help="Text that is tokenized in one go, and again after a kill (default 8 MiB).",
    )
    add(
        "--overwrite",
        action="store_true",
        help="Replace a dataset, or the parts of an unfinished run, that lie at the prefix and "
        "come from other input or other settings.",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments, rest = make_parser().parse_known_args(argv)
    try:
        _prepare(arguments, rest)
    except ValueError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("\nStopped. What is finished stays; the same command goes on from there.")
        return 130
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(
                f"No space is left for --output-prefix {arguments.output_prefix}. What is "
                "finished stays: make room there and run the same command again."
            )
        return _fail(
            f"{error.filename or 'The system'}: {error.strerror}. What is finished stays: put "
            "that right and run the same command again."
        )
    return 0


def _fail(message: str) -> int:
    print(f"prepare_data.py: error: {message}", file=sys.stderr)
    return 2


def _prepare(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    check_prefix(arguments.output_prefix)
    _check_numbers(arguments)
    sources = find_sources(
        arguments.input,
        suffixes=arguments.suffix,
        excludes=arguments.exclude,
        output_prefix=arguments.output_prefix,
    )
    options = BuildOptions(
        prefix=arguments.output_prefix,
        tokenizer=parse_tokenizer_flags(rest),
        read=ReadOptions(arguments.encoding, arguments.bad_encoding, arguments.text_key),
        document_tokens=arguments.document_tokens,
        min_document_tokens=arguments.min_document_tokens,
        part_bytes=max(1, int(arguments.part_mib * 2**20)),
        workers=arguments.workers or min(len(os.sched_getaffinity(0)), 16),
        overwrite=arguments.overwrite,
    )
    summary = up_to_date(fingerprint(sources, options), options.prefix)
    if summary is not None:
        remove_leftover(options.prefix, summary.plan)
        print(f"{options.prefix}.bin and .idx are up to date; nothing to do.")
    else:
        summary = _build_with_bar(sources, options)
    _print_summary(summary, options.prefix, arguments.seq_length)


def _check_numbers(arguments: argparse.Namespace) -> None:
    least = {
        "--document-tokens": (arguments.document_tokens, 1),
        "--min-document-tokens": (arguments.min_document_tokens, 1),
        "--seq-length": (arguments.seq_length, 1),
        "--workers": (arguments.workers, 1),
    }
    for flag, (value, minimum) in least.items():
        if value is not None and value < minimum:
            raise ValueError(f"{flag} {value} is too small: it has to be at least {minimum}.")
    if not arguments.part_mib > 0:
        raise ValueError(f"--part-mib {arguments.part_mib} is too small: it has to be above 0.")
    if math.isinf(arguments.part_mib):
        raise ValueError(
            f"--part-mib {arguments.part_mib}: has to be a number of MiB, such as the default 8. "
            "Parts as large as the input leave nothing to a second process or after a kill."
        )
    try:
        "".encode(arguments.encoding)
    except LookupError:
        raise ValueError(
            f"--encoding {arguments.encoding} is no encoding that Python knows; utf-8 and latin-1 "
            "are examples of names."
        ) from None


def _build_with_bar(sources: Sequence[Source], options: BuildOptions) -> Summary:
    total = sum(source.size for source in sources)
    bar: tqdm | None = None

    def advance(count: int) -> None:
        nonlocal bar
        # Made at the first call: by then the output and the tokenizer have been checked.
        if bar is None:
            print(
                f"Reading {_counted(len(sources), 'file')}, {total / 1e6:.1f} MB, with "
                + (f"up to {options.workers} processes" if options.workers > 1 else "1 process"),
                flush=True,
            )
            bar = tqdm(
                total=total,
                unit="B",
                unit_scale=True,
                desc="tokenizing",
                # A log file wants a line now and then, a terminal a bar that moves.
                mininterval=0.2 if sys.stderr.isatty() else 10.0,
            )
        bar.update(count)
        if bar.n >= total:
            bar.close()
            print("Joining the parts", flush=True)

    try:
        return build(sources, options, progress=advance)
    finally:
        if bar is not None:
            bar.close()


def _print_summary(summary: Summary, prefix: str, seq_length: int | None) -> None:
    print(
        f"{prefix}: {_counted(summary.documents, 'document')}, {summary.tokens:,} tokens; the "
        f"longest document has {summary.longest:,}, the shortest {summary.shortest:,}."
    )
    if summary.dropped:
        print(f"Left out {summary.dropped:,} documents below --min-document-tokens.")
    for why, count in sorted(summary.skipped.items()):
        named = [example for example in summary.examples if example.why == why]
        print(_WHY[why].format(f"{count:,}") + (", such as" if count > len(named) else ":"))
        for example in named:
            print(f"    {example.where}" + (f": {example.detail}" if example.detail else ""))
    if seq_length is not None:
        _warn_if_short(summary, seq_length)
    print("Train on it with these flags of Megatron:")
    print(f"    --data-path {prefix} {' '.join(summary.flags)}")
    print(
        "Megatron also needs --eval-interval N, to evaluate every N iterations; --eval-iters 0 "
        "beside it turns evaluation off."
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _warn_if_short(summary: Summary, seq_length: int) -> None:
    # A sample holds one token more than the context: the last one is only predicted.
    if summary.tokens < seq_length + 1:
        print(
            f"Warning: all {summary.tokens:,} tokens together do not fill one sample of "
            f"--seq-length {seq_length}; Megatron will repeat them. Give more --input."
        )
    elif summary.shortest < seq_length + 1:
        longest = "Even the longest" if summary.longest < seq_length + 1 else "The shortest"
        length = summary.longest if summary.longest < seq_length + 1 else summary.shortest
        print(
            f"Warning: {longest.lower()} document has {length:,} tokens, fewer than the "
            f"{seq_length + 1:,} of a sample of --seq-length {seq_length}; Megatron fills such "
            "samples with unrelated documents. --document-tokens joins neighbouring files into "
            "longer ones, --min-document-tokens leaves short ones out."
        )
