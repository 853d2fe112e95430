"""``fsdp convert``: a checkpoint of this package as a file or directory that other programs read."""

from __future__ import annotations

import argparse
import json
import sys
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
    """Convert, and print format and size. Return 0, or 2 with a message if that is not possible."""
    try:
        kind, target = _convert(options.source, options.target, trusted=options.trusted)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"fsdp convert: {error}", file=sys.stderr)
        return 2
    files = [target] if target.is_file() else [path for path in target.iterdir() if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files)
    if options.json:
        print(json.dumps({"source": str(options.source), "target": str(target), "format": kind, "nbytes": nbytes}))
    else:
        print(f"{target}: {kind}, {nbytes:,} bytes")
    return 0


def _convert(source: Path, target: Path, *, trusted: bool) -> tuple[str, Path]:
    """Write ``target`` in the format that the name chooses; return the format and the path.

    Raises: as the functions of ``fsdp.checkpoint``, and
        ValueError: the name is that of a file of another format.
    """
    if target.suffix == ".safetensors":
        return "safetensors", fsdp.checkpoint.to_safetensors(source, target)
    if target.suffix in _FILES:
        raise ValueError(f"expected NAME.safetensors, or a directory without such a suffix, but got {target}")
    return "torch.distributed.checkpoint", fsdp.checkpoint.to_dcp(source, target, trusted=trusted)
