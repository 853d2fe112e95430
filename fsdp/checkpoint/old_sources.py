"""Checkpoints of other programs, recognised by the names of their files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

DCP = "a directory of torch.distributed.checkpoint"
RANKS = "files of torch.save() by each rank"
SAVED = "a file of torch.save()"
SAFETENSORS = "safetensors of a model"

OF_TORCH_SAVE = (".bin", ".ckpt", ".pt", ".pth")  # suffixes
_RANK = re.compile(r"(?P<before>.*?)(world_size_(?P<count>\d+)_)?rank[_-]?(?P<number>\d+)(?P<after>.*)")
_PART = re.compile(r"(?P<before>.*)-(?P<number>\d+)-of-(?P<count>\d+)(?P<after>\..*)")
_OWN = re.compile(r"rank_\d+\.safetensors")  # in a checkpoint of this package
# Files that lie next to a checkpoint and hold neither a model nor an optimizer; many of them hold pickled objects.
_NO_STATE = re.compile(r"scheduler|rng|random|training_args|extra_state|sampler|scaler|dataloader|dl_state|metrics")


class OldFile(NamedTuple):
    """A file, with the number of the rank or part and the count of all, as far as the name has them."""

    path: Path
    number: int = 0
    total: int | None = None


class Source(NamedTuple):
    """Files that belong together. ``name`` has a star in place of their numbers."""

    kind: str
    name: str
    files: tuple[OldFile, ...]


def find_sources(path: Path) -> list[Source]:
    """Return the checkpoints of other programs at ``path``, a file or a directory."""
    if (path / ".metadata").is_file():
        return [Source(DCP, path.name, (OldFile(path),))]
    found: dict[tuple[str, str], list[OldFile]] = {}
    for entry in sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []:
        name, kind, match = entry.name, SAVED, None
        if (entry / ".metadata").is_file():
            kind = DCP
        elif name.endswith(".safetensors") and not _OWN.fullmatch(name):
            kind, match, name = SAFETENSORS, _PART.fullmatch(name), "*.safetensors" if path.is_dir() else name
        elif not name.endswith(OF_TORCH_SAVE) or _NO_STATE.search(name):
            continue
        elif (match := _PART.fullmatch(name) or _RANK.fullmatch(name)) is not None:
            kind = SAVED if match.re is _PART else RANKS
            name = f"{match['before']}*{match['after']}"
        numbers = (int(match["number"]), match["count"] and int(match["count"])) if match else ()
        found.setdefault((kind, name), []).append(OldFile(entry, *numbers))
    return [Source(*key, tuple(sorted(files, key=lambda file: file.number))) for key, files in found.items()]


def kinds_of(sources: Iterable[Source]) -> str:
    return " and ".join(dict.fromkeys(source.kind for source in sources))


def check_all_there(source: Source) -> None:
    """Check that the names of the files have one count, and each number up to it once, and that files of an index
    exist.

    Raises:
        ValueError: with the names of the files, and the numbers or files that are missing.
    """
    folder, names = source.files[0].path.parent, [file.path.name for file in source.files]
    counts = sorted({file.total for file in source.files if file.total is not None})
    numbers = [file.number for file in source.files]
    first = 0 if source.kind == RANKS else 1
    if counts or (source.kind == RANKS and len(numbers) > 1):
        expected = [*range(first, first + (counts[-1] if counts else numbers[-1] + 1))]
        if len(counts) > 1 or numbers != expected:
            of = " or ".join(map(str, counts or [len(expected)]))
            raise ValueError(
                f"{folder} has {source.name!r} for {numbers} instead of once for each of {of} ranks or parts; "
                f"missing are {sorted({*expected} - {*numbers})}; it has {names}"
            )
    for path in folder.glob("*.safetensors.index.json") if source.name == "*.safetensors" else ():
        listed = json.loads(path.read_bytes())["weight_map"].values()
        if missing_files := sorted({*listed} - {*names}):
            raise ValueError(f"{folder} has no {', '.join(missing_files)}, which {path.name} lists; it has {names}")
