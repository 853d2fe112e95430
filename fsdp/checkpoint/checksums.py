"""Checksums: a fast one for each block of a tensor file, SHA-256 for everything small.

[Note: Block checksums]
The bytes of a block are read as little-endian 64-bit words, and word ``i`` is added to column ``i % COLUMNS`` of a row
of sums, modulo 2^64. The checksum is the start of the SHA-256 of the sums and of the bytes after the last whole word.
One pass of additions costs a sixth of a SHA-256 over the block, and the sums are small.

Every change of one word changes a sum, so it is found. ``COLUMNS`` is a prime above the number of 512-byte sectors in a
block, so sectors or pages that are swapped, repeated or shifted go to other columns. The checksum is made against
damage, not against an attacker, who could write a new manifest as well.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

BLOCK = 1 << 20  # bytes; a block stays in the processor's cache between the checksum and the write or copy
COLUMNS = 2053
DIGITS = 16  # hexadecimal digits of the checksum of a block


def sha256(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def block_checksum(block: memoryview) -> str:
    """Return the checksum of at most ``BLOCK`` bytes, ``DIGITS`` long; see [Note: Block checksums]."""
    words = np.frombuffer(block, dtype="<u8", count=len(block) // 8)
    whole = len(words) // COLUMNS * COLUMNS
    sums = np.add.reduce(words[:whole].reshape(-1, COLUMNS), axis=0)
    sums[: len(words) - whole] += words[whole:]
    return sha256(sums.tobytes() + bytes(block[len(words) * 8 :]))[:DIGITS]
