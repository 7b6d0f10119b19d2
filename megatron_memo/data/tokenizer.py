"""Text to token ids: bytes by default, or any tokenizer that Megatron knows by its own flags.

The byte-level ids are what Megatron's ``--tokenizer-type NullTokenizer --vocab-size 257`` stands
for: bytes 0 to 255, and 256 as the end of a document (upstream: the last id of the vocabulary).
That tokenizer can not turn text into ids, so here the bytes are taken directly; a training run
only asks it for the size of the vocabulary and the end of a document, and agrees.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_memo.data.upstream import load_indexed_dataset

BYTE_VOCAB_SIZE = 257

# Flags of Megatron that name a file or folder which has to exist.
_PATH_FLAGS = {
    "vocab_file": "--vocab-file",
    "merge_file": "--merge-file",
    "metadata_path": "--tokenizer-metadata",
}


@dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer, as Megatron's flags; small and picklable: each worker builds its own.

    ``flags`` are the words of the command line, ready to be given to a training run; ``values``
    what Megatron's argument parser made of them (empty for bytes).
    """

    flags: tuple[str, ...] = (
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(BYTE_VOCAB_SIZE),
    )
    values: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Tokenizer:
        """The tokenizer itself.

        Raises:
            ValueError: Megatron can not build it; the paragraph says what it needs.
        """
        if not self.values:
            return Tokenizer(_encode_bytes, vocab_size=BYTE_VOCAB_SIZE, eod=BYTE_VOCAB_SIZE - 1)
        return _build_megatron(self)


@dataclass(frozen=True)
class Tokenizer:
    """A function from text to ids (``[tokens]``), with the size of its vocabulary."""

    encode: Callable[[str], npt.NDArray[Any]]
    vocab_size: int
    eod: int

    @property
    def dtype(self) -> type[np.uint16] | type[np.int32]:
        """The type that the dataset's ids are stored in.

        The same choice as upstream's ``DType.optimal_dtype``, made here so that a worker that
        takes bytes does not have to import Megatron.
        """
        return np.uint16 if self.vocab_size < 65500 else np.int32


def parse_tokenizer_flags(words: Sequence[str]) -> TokenizerSpec:
    """Megatron's tokenizer flags, parsed by Megatron's own argument group.

    Args:
        words: what the command line holds besides our flags.

    Raises:
        ValueError: a word is no tokenizer flag, a file is missing, or the byte-level vocabulary
            has another size.
    """
    if not words:
        return TokenizerSpec()
    # Imported late: it takes seconds, and bytes do without. The files first, for its quiet import.
    load_indexed_dataset()
    try:
        from megatron.training.argument_utils import ArgumentGroupFactory
        from megatron.training.config.training_config import TokenizerConfig
    except ImportError:
        from megatron_memo import compat_versions

        raise ValueError(
            f"{' '.join(words)}: reading Megatron's tokenizer flags needs megatron-core 0.18 or "
            f"newer, and this is {compat_versions.version()}. Prepare the dataset with a newer one "
            "(every version reads it), or drop the flags to store bytes."
        ) from None

    parser = argparse.ArgumentParser(prog="prepare_data.py", add_help=False, allow_abbrev=False)
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    namespace, unknown = parser.parse_known_args(list(words))
    if unknown:
        raise ValueError(
            f"{' '.join(unknown)}: neither a flag of prepare_data.py (see --help) nor one of "
            "Megatron's tokenizer flags."
        )
    values = vars(namespace)
    if values["tokenizer_type"] is None:
        raise ValueError(
            f"{' '.join(words)} was given without --tokenizer-type. Add the type, or drop these "
            "flags to store bytes."
        )
    if values["tokenizer_type"] == "NullTokenizer":
        return _byte_spec(values)
    for name, flag in _PATH_FLAGS.items():
        path = values[name]
        if path is not None and not os.path.exists(path):
            raise ValueError(f"{flag} {path} does not exist.")
    return TokenizerSpec(flags=tuple(words), values=values)


def _byte_spec(values: dict[str, Any]) -> TokenizerSpec:
    """The flags that a training run on bytes uses are accepted here too."""
    size = values["vocab_size"] or BYTE_VOCAB_SIZE
    eod = values["null_tokenizer_eod_id"]
    if size != BYTE_VOCAB_SIZE or eod not in (None, BYTE_VOCAB_SIZE - 1):
        raise ValueError(
            f"--tokenizer-type NullTokenizer stores bytes, with --vocab-size {BYTE_VOCAB_SIZE} "
            f"(the 256 bytes and the end of a document, {BYTE_VOCAB_SIZE - 1}); --vocab-size "
            f"{size} or --null-tokenizer-eod-id {eod} does not agree. Drop both flags, or choose "
            "another --tokenizer-type."
        )
    return TokenizerSpec()


def _encode_bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def _build_megatron(spec: TokenizerSpec) -> Tokenizer:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    # The model's padded vocabulary is the training run's business.
    arguments = argparse.Namespace(**{**spec.values, "pad_vocab_size": False, "rank": 0})
    try:
        upstream = build_tokenizer(arguments)
        vocab_size, eod = int(upstream.vocab_size), int(upstream.eod)
    # Each of upstream's tokenizer libraries fails in its own way, assertions included; whatever
    # it says, what the user can do about it is the same.
    except Exception as error:
        raise ValueError(
            f"Megatron can not build the tokenizer {' '.join(spec.flags)}: "
            f"{type(error).__name__}: {error}. Check --tokenizer-type and the files it needs "
            "(--tokenizer-model, or --vocab-file and --merge-file); a name of a model hub needs "
            "the network, a local folder does not."
        ) from error
    if not 0 <= eod < vocab_size:
        raise ValueError(
            f"The tokenizer {' '.join(spec.flags)} has no end-of-document token (its id is {eod}, "
            f"the vocabulary has {vocab_size}), and Megatron's datasets need one. Choose a "
            "tokenizer that has one, or add it as a special token."
        )
    return Tokenizer(
        lambda text: np.asarray(upstream.tokenize(text), dtype=np.int64),
        vocab_size=vocab_size,
        eod=eod,
    )
