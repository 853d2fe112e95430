"""What a checkpoint costs at many ranks, of which there is one process: ``bench_checkpoint.py --simulate-ranks N``.

Each rank is a thread with a state of its own, as flat shards of a model have it: plans, files, agreement and loads are
those of :mod:`fsdp.checkpoint`, and only the messages go through queues instead of the network. One thread runs at a
time, so that its processor time is what a rank of a real job would take; threads wait for each other as ranks do. The
model grows with the number of ranks, so that each has as much: what grows in the table is what the number costs.
"""

import pickle
import queue
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint import files
from fsdp.checkpoint.keys import GROUPS, MODEL, state_key
from fsdp.checkpoint.load_checkpoint import _fetched, _Like, _Reading
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.save_checkpoint import Save, _packed
from fsdp.comm.consensus import Ranks

SIZES = (8, 64, 512, 4096)
EXTRA = _packed(torch.zeros(8192, dtype=torch.uint8))  # such is the state of random generators


class Cost(NamedTuple):
    """Of one call on one rank: seconds of the processor, messages sent, and bytes sent and received."""

    seconds: float
    messages: int
    sent: int
    received: int


class Network:
    """Queues between ranks, and the processor, which one of them has at a time."""

    def __init__(self) -> None:
        self.processor = threading.Lock()
        self._queues: dict[tuple[int, int], queue.SimpleQueue[bytes]] = {}

    def queue(self, source: int, target: int) -> queue.SimpleQueue[bytes]:
        return self._queues.setdefault((source, target), queue.SimpleQueue())


class Side:
    """What a rank talks over; see ``fsdp.comm.consensus``."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank
        self.messages = self.sent = self.received = 0

    def join(self, call: int) -> None:
        pass

    def why(self) -> None:
        return None

    def spoil(self, call: int, words: str) -> None:
        raise SystemExit(words)

    def send(self, rank: int, value: Any) -> None:
        data = pickle.dumps(value)
        self.messages, self.sent = self.messages + 1, self.sent + len(data)
        self._network.queue(self._rank, rank).put(data)

    def receive(self, rank: int) -> Any:
        arriving = self._network.queue(rank, self._rank)
        if arriving.empty():
            self._network.processor.release()
            data = arriving.get()
            self._network.processor.acquire()
        else:
            data = arriving.get()
        self.received += len(data)
        return pickle.loads(data)


def ranks_of(rank: int, size: int, network: Network) -> tuple[Ranks, Side]:
    ranks, side = Ranks(), Side(network, rank)
    ranks.rank, ranks.size, ranks._side = rank, size, side  # type: ignore[assignment]
    return ranks, side


def shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Of one unit: each rank has 264 elements, in a few boxes."""
    return {"in": (8 * size, 16), "in_bias": (16,), "out": (16, 8 * size), "out_bias": (8 * size,)}


def state_of(rank: int, size: int, units: int) -> dict[str, Any]:
    """What a rank has of model and optimizer, as :meth:`Save.take` leaves it."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes(size).items()}
    shard, offset, parts = -(-sum(sizes.values()) // size), 0, []
    for name, shape in shapes(size).items():
        start, end = (min(max(place * shard - offset, 0), sizes[name]) for place in (rank, rank + 1))
        parts.append((name, shape, start, end))
        offset += sizes[name]
    state: dict[str, Any] = {}
    for param, shape, start, end in ((f"{unit}.{name}", *rest) for unit in range(units) for name, *rest in parts):
        local = torch.full((end - start,), float(rank))
        for key in (MODEL + param, state_key(param, "exp_avg"), state_key(param, "exp_avg_sq")):
            state[key] = RaggedTensor(local, shape, start)
        if rank == 0:
            state[state_key(param, "step")] = torch.tensor(1.0)
    return state if rank > 0 else {**state, GROUPS: []}


def on_all(size: int, action: Callable[[int, Network], list[Cost]]) -> list[list[Cost]]:
    """What ``action`` costs on each rank."""
    network, results = Network(), [list[Cost]()] * size

    def rest(rank: int) -> None:
        with network.processor:
            results[rank] = action(rank, network)

    threading.stack_size(1 << 19)
    threads = [threading.Thread(target=rest, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def costs_of(rank: int, size: int, network: Network, root: Path, units: int) -> list[Cost]:
    """Of a save, of another one of the same, and of a load."""
    ranks, side = ranks_of(rank, size, network)
    costs = []

    def measure(action: Callable[[], Any]) -> Any:
        begin, before = time.thread_time(), (side.messages, side.sent, side.received)
        result = action()
        now = (side.messages, side.sent, side.received)
        costs.append(Cost(time.thread_time() - begin, *(its - was for its, was in zip(now, before))))
        return result

    def save() -> None:
        saving = Save(ranks, root, None)
        saving._state, saving._extra = state_of(rank, size, units), EXTRA
        with ranks.call("save"):
            saving.write(progress=False)

    def load() -> Any:
        state = state_of(rank, size, units)
        model = {key.removeprefix(MODEL): value for key, value in state.items() if key.startswith(MODEL)}
        with ranks.call("load"):
            return _fetched(ranks, root, lambda: _Like(model, model), _Reading(True, False, False), optimizer=True)

    measure(save)
    measure(save)
    read, _ = measure(load)
    held = [value.local for value in read.model.values() if isinstance(value, RaggedTensor)]
    assert all(bool((local == rank).all()) for local in held)
    return costs


def main(directory: Path, largest: int, units: int) -> None:
    print(
        f"{units} units of {len(shapes(1))} parameters with two states each. Of ranks other than 0 the largest numbers."
    )
    for size in (*(size for size in SIZES if size < largest), largest):
        root, before = directory / str(size), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def action(rank: int, network: Network, size: int = size, root: Path = root) -> list[Cost]:
            return costs_of(rank, size, network, root, units)

        results = on_all(size, action)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        made = next(root.glob("checkpoint_*"))
        nbytes = [(made / name).stat().st_size / 1e3 for name in (files.INDEX, files.MANIFEST, files.part_name(1))]
        print(
            f"\n{size} ranks: {peak / size:.2f} MB of memory a rank, {size} of which are in one process; index ", end=""
        )
        print(f"{nbytes[0]:.1f} kB, manifest {nbytes[1]:.1f} kB, rank 1's own index {nbytes[2]:.1f} kB")
        for number, call in enumerate(("save", "save, nothing changed", "load")):
            others = [costs[number] for costs in results[1:]]
            median = statistics.median(cost.seconds for cost in others)
            print(f"  {call:21}  rank 0: {_cost(results[0][number])}")
            print(f"  {'':21}  others: {_cost(Cost(*map(max, zip(*others))))}, median {median:.3f} s", flush=True)
        shutil.rmtree(root)


def _cost(cost: Cost) -> str:
    size = f"{cost.sent / 1e3:7.1f} kB sent in {cost.messages} messages, {cost.received / 1e3:7.1f} kB received"
    return f"{cost.seconds:6.3f} s, {size}"
