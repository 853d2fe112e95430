"""Kill saves, damage checkpoints and make disks fail at random; a load then gives the old or the new checkpoint, whole.

    python scripts/fault_checkpoints.py [--kills 200] [--damages 500] [--errors 500] [--seed N]
    python scripts/fault_checkpoints.py --hosts [--width 11]

* kills: two ranks save; one of them, or both, are killed by SIGKILL at a random moment.
* damages: a bit of one of the files is flipped, or it is cut, made longer, zeroed in part, or lost.
* errors: an operation of one save on the file system fails, a write in its middle.

After each, the loaded checkpoint holds the values of one save alone, of the new one if a save returned on some rank,
and the next save works. A violation is counted, and printed with the seed of the test: lost (no checkpoint can be
loaded), torn (values of two saves), wrong (a damage that was not found, or a failed load that changed the model). The
exit code is 0 only without violations. Every test has a seed, from which it can be repeated alone (`--seed N --kills 1`
...).

With --hosts instead: three ranks under `torchrun --max-restarts 1`, each a host, save every step to the memory of the
hosts. Each rank is killed in each phase of a step. The table has the step from which the run went on, the seconds from
the kill to the end of the next step, and whether the final weights are those of an undisturbed run. In two phases, runs
that save to one directory on disk instead (in `TMPDIR`) are killed as well. A second table has medians of the time and
its parts: until the new processes have imported the program, have a group, have built the model, have loaded, and have
done a step.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel
from fsdp.checkpoint import load, load_plain, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import test_local
from tests.harness.disk import FaultyDisk, on_disk

RANKS = 2
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT)


class Model(nn.Module):
    """Every value in it is `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 9))
        self.register_buffer("table", torch.empty(5))
        for tensor in [*self.parameters(), *self.buffers()]:
            tensor.detach().fill_(value)

    def get_extra_state(self) -> float:
        return float(self.table[0])

    def set_extra_state(self, state: float) -> None:
        pass


def trained(value: float, *, wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer whose states are `value`."""
    model: nn.Module = Model(value)
    model = FullyShardedDataParallel(model, use_orig_params=True) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param] = {"momentum_buffer": torch.full_like(param, value)}
    return model, optimizer


def value_in(root: Path) -> float | None:
    """Return the value of all tensors in the latest checkpoint; None if there are several values."""
    model, optimizer, extras = load_plain(root, progress=False)
    assert optimizer is not None
    states = [value for of in optimizer["state"].values() for value in of.values()]
    values = {float(x) for value in [*model.values(), *states] for x in torch.as_tensor(value).unique()}
    values |= {float(group["lr"]) for group in optimizer["param_groups"]} | set(extras)
    return values.pop() if len(values) == 1 else None


# -- kills -------------------------------------------------------------------------------------------------------------


def rank_saves(rank: int, root: Path, store: Path, value: float, keep: int | None, begins: int) -> None:
    """Save in a forked process: write to the pipe `begins` at the start, and exit with 0 if the save returned."""
    code = 1
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
        model, optimizer = trained(value, wrapped=True)
        dist.barrier()
        os.write(begins, b"x")
        with contextlib.suppress(RuntimeError):  # the peer is dead
            save(root, model, optimizer, extra=value, keep=keep)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def save_in_ranks(root: Path, value: float, keep: int | None, killed: dict[int, float]) -> tuple[list[int], float]:
    """Return the exit code of each rank, and the seconds of the save. `killed`: ranks to kill, and after which time."""
    store = Path(tempfile.mkdtemp()) / "store"
    reading, writing = os.pipe()
    ranks = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            rank_saves(rank, root, store, value, keep, writing)
        ranks.append(process)
    os.close(writing)
    if any(os.read(reading, 1) == b"" for _ in ranks):
        raise RuntimeError(f"a rank died before it began to save into {root}")
    started = time.monotonic()
    for rank, after in sorted(killed.items(), key=lambda item: item[1]):
        time.sleep(max(0.0, started + after - time.monotonic()))
        os.kill(ranks[rank], signal.SIGKILL)
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    os.close(reading)
    shutil.rmtree(store.parent)
    return ended, time.monotonic() - started


def kill(seed: int, root: Path) -> str:
    chance = random.Random(seed)
    _, took = save_in_ranks(root, 1.0, None, {})
    several = chance.choice(([0], [1], [0, 1]))
    killed = {rank: chance.uniform(0, 1.1 * took) for rank in several}
    ended, _ = save_in_ranks(root, 2.0, chance.choice((None, 1)), killed)
    found = value_in(root)
    if found is None:
        return "torn"
    if found not in (1.0, 2.0) or (0 in ended and found != 2.0):
        return f"wrong: {found} with ranks that ended with {ended}"
    ended, _ = save_in_ranks(root, 3.0, 1, {})
    if ended != [0] * RANKS or value_in(root) != 3.0 or len(list(root.iterdir())) != 2:
        return f"wrong: the next save ended with {ended} and left {sorted(os.listdir(root))}"
    return f"well, {'old' if found == 1.0 else 'new'}"


# -- damages -----------------------------------------------------------------------------------------------------------


def damage(seed: int, root: Path) -> str:
    chance = random.Random(seed)
    for value in (1.0, 2.0):
        save(root, *trained(value, wrapped=False), extra=value, progress=False)
    directory = root / "checkpoint_00000002"
    path = chance.choice([root / "latest", *sorted(directory.iterdir())])
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    how = chance.choice(("flipped", "flipped", "cut", "longer", "zeroed", "lost"))
    if how == "flipped":
        content[place] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "longer":
        content += chance.randbytes(1 + place)
    elif how == "zeroed":
        end = min(len(content), place + chance.randrange(1, 512))
        if not any(content[place:end]):
            content[place] = 1
        else:
            content[place:end] = bytes(end - place)
    path.write_bytes(content)
    if how == "lost":
        path.unlink()
    model, optimizer = trained(7.0, wrapped=False)
    try:
        load(root, model, optimizer, progress=False)
    except (RuntimeError, FileNotFoundError) as error:
        if path.name not in str(error):
            return f"wrong: {path.name} {how}, and told was {error}"
    else:
        return f"wrong: {path.name} {how} in byte {place} was not noticed"
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    if any(
        (value != 7.0).any() for value in [*model.state_dict().values(), *states] if isinstance(value, torch.Tensor)
    ):
        return f"wrong: {path.name} {how}, and the model has changed"
    return f"well, {how}"


# -- errors ------------------------------------------------------------------------------------------------------------


def fail(seed: int, root: Path) -> str:
    chance = random.Random(seed)
    save(root, *trained(1.0, wrapped=False), extra=1.0, progress=False)
    keep = chance.choice((None, 1))
    with on_disk(counting := FaultyDisk()):
        save(root.with_name("counted"), *trained(2.0, wrapped=False), extra=2.0, keep=1, progress=False)
    at, number = chance.randrange(counting.count + 2), chance.choice(ERRORS)
    failing = FaultyDisk(at, OSError(number, os.strerror(number)), lasting=chance.random() < 0.3)
    told = True
    with on_disk(failing):
        try:
            save(root, *trained(2.0, wrapped=False), extra=2.0, keep=keep, progress=False)
        except OSError as error:
            told = False
            if error.errno != number or (error.filename is None and failing.count > failing.at):
                return f"wrong: told was {error}"
    found = value_in(root)
    if found is None:
        return "torn"
    if found not in (1.0, 2.0) or (told and found != 2.0):
        return f"wrong: {found}"
    save(root, *trained(3.0, wrapped=False), extra=3.0, keep=1, progress=False)
    if value_in(root) != 3.0 or len(list(root.iterdir())) != 2:
        return f"wrong: after the next save there are {sorted(os.listdir(root))}"
    return f"well, {'old' if found == 1.0 else 'new'}"


# -- all of it ---------------------------------------------------------------------------------------------------------


def run(name: str, count: int, seed: int, test: Callable[[int, Path], str]) -> bool:
    outcomes: Counter[str] = Counter()
    for number in range(seed, seed + count):
        folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
        try:
            outcome = test(number, folder / "run")
        except (RuntimeError, OSError) as error:
            outcome = f"lost: {type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder)
        if not outcome.startswith("well"):
            print(f"{name}, seed {number}: {outcome}", flush=True)
        outcomes[outcome if outcome.startswith("well") else outcome.partition(":")[0]] += 1
    found = ", ".join(f"{outcomes[kind]} {kind}" for kind in sorted(outcomes))
    print(f"{name}, seeds {seed} to {seed + count - 1}: {found or 'none'}", flush=True)
    return all(kind.startswith("well") for kind in outcomes)


# -- the memory of hosts -----------------------------------------------------------------------------------------------


class Disk(type(Path())):  # type: ignore[misc]
    """A directory of checkpoints of all hosts, which saves as `Local` does."""

    def save(self, *states: Any, extra: Any) -> Path:
        return save(self, *states, extra=extra, keep=2, progress=False)


def host_rank(root: Path, phase: str, victim: int, disk: str, width: int) -> None:
    """Train as one rank of `torchrun`, to be killed in the first start."""
    times, start, kill = {"processes": time.time()}, os.environ["TORCHELASTIC_RESTART_COUNT"], os.kill
    store = dist.FileStore(str(root / f"store{start}"), test_local.HOSTS)  # the launcher's has keys of the start before
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=test_local.HOSTS)
    times["group"] = time.time()
    is_first = start == "0"

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = function(*args)
            times.setdefault(name, time.time())
            return result

        return run

    def note_kill(*args: Any) -> None:
        (root / "killed").touch()
        kill(*args)

    changed: dict[str, Any] = {name: noted(name, getattr(test_local, name)) for name in ("built", "load", "step")}
    if disk:
        changed["host"] = lambda root: contextlib.nullcontext(Disk(disk))
    with mock.patch.multiple(test_local, WIDTH=width, **changed), mock.patch.object(os, "kill", note_kill):
        begun, params = test_local.train(str(root), phase if is_first else "", victim)
    if is_first and phase != "none":
        sys.exit(1)  # another rank is dead
    torch.save((begun, params, times), root / f"weights{dist.get_rank()}")


def hosts(width: int) -> bool:
    taken: dict[str, list[dict[str, float]]] = {"memory": [], "disk": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, tempfile.TemporaryDirectory() as slow:

        def run_hosts(phase: str, victim: int, kept: str) -> tuple[int, list[torch.Tensor]]:
            """Return the step from which the run went on, and the weights of all ranks; note the seconds of the parts,
            each until the last rank is there."""
            root = Path(folder, f"{phase}{victim}{kept}")
            root.mkdir()
            (root / "killed").touch()
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
            command += [f"--nproc-per-node={test_local.HOSTS}", "--monitor-interval=0.1", __file__]
            command += ["--width", str(width), "--host", str(root), phase, str(victim)]
            subprocess.run([*command, f"{slow}/{root.name}" * (kept == "disk")], check=True, capture_output=True)
            found = [torch.load(root / f"weights{rank}") for rank in range(test_local.HOSTS)]
            ends = {part: max(times[part] for *_, times in found) for part in found[0][2]}
            begins = [(root / "killed").stat().st_mtime, *ends.values()]
            taken[kept].append({part: end - begin for (part, end), begin in zip(ends.items(), begins)})
            shutil.rmtree(root)
            return found[0][0], [param for _, params, _ in found for param in params]

        _, expected = run_hosts("none", -1, "memory")
        taken["memory"].clear()
        cases = [("memory", phase) for phase in test_local.PHASES] + [("disk", "forward"), ("disk", "write")]
        print("| rank | killed in | kept in | goes on after step | seconds to the next step | weights |")
        print("|---|---|---|---|---|---|")
        all_well = True
        for victim, (kept, phase) in product(range(test_local.HOSTS), cases):
            begun, found = run_hosts(phase, victim, kept)
            well = all(map(torch.equal, found, expected))
            all_well &= well
            seconds, words = sum(taken[kept][-1].values()), "equal" if well else "DIFFERENT"
            print(f"| {victim} | {phase} | {kept} | {begun} | {seconds:.1f} | {words} |", flush=True)
    print(f"| seconds, medians | all | {' | '.join(taken['disk'][0])} |\n{'|---' * 7}|")
    for kept, several in taken.items():
        columns = [[sum(each.values()) for each in several], *zip(*(each.values() for each in several))]
        print(f"| {kept} | {' | '.join(f'{median(column):.2f}' for column in columns)} |")
    return all_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--errors", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--width", type=int, default=11, help="of the model with --hosts, a 13th of its parameters")
    parser.add_argument("--host", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0"}
    if options.host:
        root, phase, victim, disk = options.host
        host_rank(Path(root), phase, int(victim), disk, options.width)
        return 0
    if options.hosts:
        return int(not hosts(options.width))
    torch.set_num_threads(1)  # so that processes can be forked
    importlib.import_module("torch._dynamo")  # once, and not by the first optimizer of each of them
    warnings.filterwarnings("ignore", ".*could not be removed")
    well = run("kills", options.kills, options.seed, kill)
    well &= run("damages", options.damages, options.seed, damage)
    return int(not (run("errors", options.errors, options.seed, fail) and well))


if __name__ == "__main__":
    sys.exit(main())
