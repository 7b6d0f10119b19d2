"""Whether the two files of an indexed dataset are whole, from a few bytes of them."""

from __future__ import annotations

import os
import struct

# Upstream's index file (megatron/core/datasets/indexed_dataset.py): this mark, version (8 bytes),
# type of the ids (1), number of sequences n and of document bounds d (8 each); then lengths in
# tokens (n of 4 bytes), offsets into the .bin (n of 8), document bounds (d of 8), and for
# multimodal data n more bytes. All little-endian.
_MARK = b"MMIDIDX\x00\x00"
_VERSION = 1
_COUNTS = struct.Struct("<QBQQ")
# Bytes of an id by upstream's code of its type.
_ID_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


def damage(prefix: str) -> str | None:
    """What is wrong with ``prefix.idx`` and ``prefix.bin``, or None where Megatron can read them.

    Reads the header and the last sequence's entry only, so that it costs the same for any size.

    Returns:
        A clause that names the file, such as "data.bin has 10 bytes and data.idx needs 20".

    Raises:
        OSError: a file cannot be read.
    """
    index, tokens = prefix + ".idx", prefix + ".bin"
    size = os.path.getsize(index)
    with open(index, "rb") as file:
        if file.read(len(_MARK)) != _MARK:
            return f"{index} is not a Megatron index file (it does not begin with MMIDIDX)"
        head = file.read(_COUNTS.size)
        if len(head) < _COUNTS.size:
            return f"{index} ends after {size} bytes, inside its header"
        version, code, sequences, bounds = _COUNTS.unpack(head)
        if version != _VERSION or code not in _ID_BYTES:
            return (
                f"{index} has version {version} and id type {code}, and Megatron reads version "
                f"{_VERSION} with types 1 to {max(_ID_BYTES)}"
            )
        start = file.tell()
        whole = start + sequences * (4 + 8) + bounds * 8
        if size < whole:
            return f"{index} has {size:,} bytes where its header needs {whole:,}"
        if not sequences:
            return f"{index} says that the dataset is empty"
        file.seek(start + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(start + 4 * sequences + 8 * (sequences - 1))
        (offset,) = struct.unpack("<q", file.read(8))
    needed = offset + length * _ID_BYTES[code]
    have = os.path.getsize(tokens)
    if have < needed:
        return f"{tokens} has {have:,} bytes where {index} needs {needed:,}"
    return None
