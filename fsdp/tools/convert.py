"""``fsdp convert``: a checkpoint of this package as a file or directory that other programs read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import fsdp.checkpoint

_FILES = (".bin", ".ckpt", ".pt", ".pth")  # suffixes of files that torch.save writes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fsdp convert``."""
    parser.add_argument("source", type=Path, help="a directory of checkpoints (the latest counts), or one checkpoint")
    parser.add_argument(
        "target",
        type=Path,
        help="NAME.safetensors: the model as one file; any other name: a directory for torch.distributed.checkpoint, "
        "with the optimizer's state",
    )
    parser.add_argument("--trusted", action="store_true", help="load pickled objects, which may run code")
    parser.add_argument("--json", action="store_true", help="print format and size as JSON")


def run(options: argparse.Namespace) -> int:
    """Convert, print format and size, and return 0.

    Raises: as the functions of ``fsdp.checkpoint``, and
        ValueError: the target's name is that of a file of another format.
    """
    source, target = options.source, options.target
    if target.suffix in _FILES:
        raise ValueError(f"expected NAME.safetensors, or a directory without such a suffix, but got {target}")
    if target.suffix == ".safetensors":
        kind, files = "safetensors", [fsdp.checkpoint.to_safetensors(source, target)]
    else:
        kind = "torch.distributed.checkpoint"
        files = list(fsdp.checkpoint.to_dcp(source, target, trusted=options.trusted).iterdir())
    nbytes = sum(path.stat().st_size for path in files)
    if options.json:
        print(json.dumps({"source": str(source), "target": str(target), "format": kind, "nbytes": nbytes}))
    else:
        print(f"{target}: {kind}, {nbytes:,} bytes")
    return 0
