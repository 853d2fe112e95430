"""``fsdp convert``: a checkpoint of this package for other programs, or one of another program for this package."""

from __future__ import annotations

import argparse
from pathlib import Path

import fsdp.checkpoint
from fsdp.checkpoint import files
from fsdp.checkpoint.incoming import Old, find_old
from fsdp.checkpoint.old_sources import OF_TORCH_SAVE
from fsdp.tools.plan import classes_of, on_meta, resolved
from fsdp.tools.text import in_bytes, in_dtype
from fsdp.wrap import ModuleWrapPolicy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fsdp convert``."""
    add = parser.add_argument
    add("source", type=Path, help="a checkpoint of any kind; of a directory of this package's, the latest")
    add(
        "target",
        type=Path,
        nargs="?",
        help="NAME.safetensors: the model as one file; any other name: a directory for a checkpoint, of this package "
        "if the source is of another program, else of torch.distributed.checkpoint",
    )
    add("--list", action="store_true", help="show what a source of another program holds, and write nothing")
    add("--model", type=resolved, metavar="MODULE:NAME", help="the plain model, or a function that makes it")
    add("--wrap", metavar="CLASS,...", help="classes of modules that torch's FSDP1 had wrapped")
    add("--trusted", action="store_true", help="load pickled objects of this package's checkpoints, which may run code")


def run(options: argparse.Namespace) -> int:
    """Convert, print format and size, and return 0.

    Raises: as the functions of ``fsdp.checkpoint``, and
        ValueError: the target's name is that of a file of another format, or missing.
    """
    source, target = options.source, options.target
    model = on_meta(options.model) if options.model else None
    policy = ModuleWrapPolicy(classes_of(model, options.wrap)) if model is not None and options.wrap else None
    if options.list:
        print(_described(find_old(source, model, policy)))
        return 0
    if target is None or target.suffix in OF_TORCH_SAVE:
        found = f"got {target}" if target else "the target is missing"
        raise ValueError(f"expected NAME.safetensors, or a directory without such a suffix, but {found}")
    made = fsdp.checkpoint.convert(source, target, model=model, auto_wrap_policy=policy, trusted=options.trusted)
    kind = "safetensors"
    if made.is_dir():
        kind = files.FORMAT if (made / files.MANIFEST).is_file() else "torch.distributed.checkpoint"
    nbytes = sum(path.stat().st_size for path in (made.iterdir() if made.is_dir() else [made]))
    print(f"{made}: {kind}, {nbytes:,} bytes")
    return 0


def _described(old: Old) -> str:
    lines = [f"{old.kinds}, {old.files} files"]
    for key, tensor in sorted(old.tensors.items()):
        lines.append(f"  {key}: {in_dtype(tensor.dtype)} {list(tensor.shape)}")
    lines += [f"  {key}" for key in (*sorted(old.values), *(["extra"] if old.extra else []))]
    lines += [f"left out: {name}" for name in old.left_out]
    nbytes = sum(tensor.dtype.itemsize * chunk.box.numel for tensor in old.tensors.values() for chunk in tensor.chunks)
    return "\n".join([*lines, f"{in_bytes(nbytes)} in {len(old.tensors)} tensors"])
