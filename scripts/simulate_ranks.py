"""The cost of a checkpoint at many ranks, in one process: ``bench_checkpoint.py --simulate-ranks N``.

Each rank is a thread with the state of flat shards of a model. Files, agreement and loads are those of
:mod:`fsdp.checkpoint`, and only the messages go through queues instead of the network. One thread runs at a time, so
the processor time of a thread is that of a rank in a real job. The model grows with the number of ranks, so that each
rank has the same number of elements: a number that grows in the table is the cost of more ranks.

The garbage collector is off: it would search the objects of all ranks in the time of one.

The table also has the time of a rank to plan and pack messages when sharded state becomes chunks of rows or goes to
rank 0, with and without cached geometry, and the time to describe 10^12 parameters.
"""

import gc
import itertools
import math
import pickle
import queue
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from fsdp.checkpoint import files, index
from fsdp.checkpoint.forms import Form, Full, Held, Rows
from fsdp.checkpoint.keys import EXTRA, GROUPS, MODEL, param_and_state, state_key
from fsdp.checkpoint.load_checkpoint import Contents, Needed, Reading, fetched
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.save_checkpoint import Save
from fsdp.checkpoint.transfers import export
from fsdp.comm.consensus import Ranks, tree
from fsdp.placement import redistribute

SIZES = (8, 64, 512, 4096)
RANDOM = torch.zeros(8192, dtype=torch.uint8)  # in place of the states of random generators


class Cost(NamedTuple):
    """The cost of one call on one rank: processor seconds, messages sent, and bytes sent and received."""

    seconds: float
    messages: int
    sent: int
    received: int


class Network:
    """Queues between ranks, and the lock of the processor, which one rank holds at a time."""

    def __init__(self) -> None:
        self.processor = threading.Lock()
        self._queues: dict[tuple[int, int], queue.SimpleQueue[bytes]] = {}

    def queue(self, source: int, target: int) -> queue.SimpleQueue[bytes]:
        return self._queues.setdefault((source, target), queue.SimpleQueue())


class Side:
    """The messages of one rank, in place of the side group of ``fsdp.comm.consensus``."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self._network, self._rank, self.global_ranks = network, rank, range(size)
        self.messages = self.sent = self.received = 0

    def missed_a_call(self) -> bool:
        return False

    def join(self, call: int, doing: str) -> None:
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
    ranks, side = Ranks(), Side(network, rank, size)
    ranks.rank, ranks.size, ranks._side = rank, size, side  # type: ignore[assignment]
    return ranks, side


def shapes(size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one unit's parameters; each rank holds 264 elements, in a few boxes."""
    return {"in": (8 * size, 16), "in_bias": (16,), "out": (16, 8 * size), "out_bias": (8 * size,)}


@lru_cache(1)
def spans_of(size: int) -> dict[str, list[tuple[int, int]]]:
    """Return for each parameter of a unit the interval of elements of each rank."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes(size).items()}
    shard, offset, found = -(-sum(sizes.values()) // size), 0, {}
    for name, numel in sizes.items():
        cuts = [min(max(rank * shard - offset, 0), numel) for rank in range(size + 1)]
        found[name] = list(itertools.pairwise(cuts))
        offset += numel
    return found


def state_of(rank: int, size: int, units: int) -> dict[str, Any]:
    """Return the state of the model and the optimizer on a rank, by keys of the checkpoint."""
    parts = [(name, shapes(size)[name], *its[rank]) for name, its in spans_of(size).items()]
    state: dict[str, Any] = {}
    for param, shape, start, end in ((f"{unit}.{name}", *rest) for unit in range(units) for name, *rest in parts):
        local = torch.full((end - start,), float(rank))
        for key in (MODEL + param, state_key(param, "exp_avg"), state_key(param, "exp_avg_sq")):
            state[key] = RaggedTensor(local, shape, start)
        if rank == 0:
            state[state_key(param, "step")] = torch.tensor(1.0)
    return state if rank > 0 else {**state, GROUPS: []}


def on_all(size: int, action: Callable[[int, Network], list[Cost]]) -> list[list[Cost]]:
    """Return the costs of ``action`` on each rank."""
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
    """Return the costs of a save, of a second save, and of a load."""
    ranks, side = ranks_of(rank, size, network)
    costs = []

    def measure(action: Callable[[], Any]) -> Any:
        begin, before = time.thread_time(), (side.messages, side.sent, side.received)
        result = action()
        now = (side.messages, side.sent, side.received)
        costs.append(Cost(time.thread_time() - begin, *(its - was for its, was in zip(now, before))))
        return result

    def save() -> None:
        saving = Save(ranks, root, None, trusted=False)
        saving.share(state_of(rank, size, units))
        saving.pack(EXTRA, RANDOM)
        with ranks.call("save"):
            saving.write(progress=False)

    def load() -> Any:
        state = state_of(rank, size, units)
        model = {key.removeprefix(MODEL): value for key, value in state.items() if key.startswith(MODEL)}

        def plan(contents: Contents) -> list[Any]:
            contents.optimizer_state(model)
            likes = {key: model[param_and_state(key)[0]] for key in contents.states}
            for key, target in contents.shadow(likes).items():
                contents.states[key].target = target
            return []

        with ranks.call("load"), ExitStack() as stack:
            return fetched(ranks, root, Needed(model, [model]), plan, Reading(), stack)

    measure(save)
    measure(save)
    found = measure(load)
    held = [value.local for value in found.model.values() if isinstance(value, RaggedTensor)]
    assert all(bool((local == rank).all()) for local in held)
    return costs


def moved(rank: int, size: int, units: int, form: Form) -> tuple[Cost, Cost]:
    """Return the cost for ``rank`` to plan and pack messages to ``form``, the first time and the second."""
    channel = redistribute.Channel(None, torch.device("cpu"))
    channel.rank, channel.size = rank, size
    messages = [0, 0, 0]

    def exchange(received: Any, sent: Any, arriving: list[int], leaving: list[int], *rest: Any) -> Any:
        for number, several in enumerate(([1 for nbytes in leaving if nbytes], leaving, arriving)):
            messages[number] += sum(several)
        return mock.Mock()

    def once() -> Cost:
        messages[:] = 0, 0, 0
        begin = time.thread_time()
        export(held, form, channel, "simulated")
        channel.flush()
        return Cost(time.thread_time() - begin, *messages)

    held = [
        Held(RaggedTensor(torch.ones(its[rank][1] - its[rank][0]), shapes(size)[name], its[rank][0]), owners(its))
        for _ in range(3 * units)
        for name, its in spans_of(size).items()
    ]
    with mock.patch.object(redistribute, "exchange", exchange):
        return once(), once()


def owners(spans: list[tuple[int, int]]) -> Callable[[], list[tuple[int, int, int]]]:
    """Return the function that lists the intervals of a parameter, as a unit has it."""
    return lambda: [(rank, start, end) for rank, (start, end) in enumerate(spans) if start < end]


def of_large_model(rank: int, size: int, unit: int, width: int) -> dict[str, Any]:
    """Return meta tensors of a transformer's block and the two optimizer states, as ``rank`` holds them."""
    wide, long = 4 * width, {"norm1", "norm2", "out_bias", "down_bias"}
    several = dict.fromkeys(long, (width,)) | {"in": (3 * width, width), "in_bias": (3 * width,)}
    several |= {"out": (width, width), "up": (wide, width), "up_bias": (wide,), "down": (width, wide)}
    shard = -(-sum(map(math.prod, several.values())) // size)
    offset, state = 0, {}
    for name, shape in several.items():
        start, end = (min(max(place * shard - offset, 0), math.prod(shape)) for place in (rank, rank + 1))
        offset += math.prod(shape)
        local = torch.empty(end - start, device="meta")
        for key in (MODEL + f"{unit}.{name}", *(state_key(f"{unit}.{name}", of) for of in ("exp_avg", "exp_avg_sq"))):
            state[key] = RaggedTensor(local, shape, start)
    return state


def plan_of_large_model(size: int, units: int, width: int) -> None:
    """Print the cost of a save of such a model without the files: of the description on a rank, and of joining
    descriptions on rank 0."""

    def described(rank: int, units: Iterable[int]) -> tuple[index.Table, float]:
        state = {key: its for unit in units for key, its in of_large_model(rank, size, unit, width).items()}
        ranks = Ranks()
        ranks.rank, ranks._side = rank, Side(Network(), rank, size)  # type: ignore[assignment]
        saving = Save(ranks, "", None, trusted=False)
        begin = time.thread_time()
        saving.share(state)
        return saving.table, time.thread_time() - begin

    def of_all_units(table: index.Table) -> index.Table:
        """Repeat the entries of the first unit for all units."""
        return {key.replace("0.", f"{unit}.", 1): its for unit in range(units) for key, its in table.items()}

    numel = units * sum(math.prod(its.shape) for key, its in of_large_model(0, 1, 0, width).items() if MODEL in key)
    own, seconds = described(size // 2, range(units))
    of_one = [described(rank, [0])[0] for rank in range(size)]
    children = [of_all_units(index.joined([of_one[rank] for rank in its])) for its in tree(0, size)[1]]
    begin = time.thread_time()
    table = index.joined([of_all_units(of_one[0]), *children])
    index.check_complete(table)
    content = index.packed(table)
    joining = time.thread_time() - begin
    heard = sum(len(pickle.dumps(child)) for child in children)
    print(
        f"  {numel:.3g} parameters in {units} units on {size} ranks, {3 * numel * 4 / size / 1e9:.1f} GB each of "
        f"{len(table)} tensors: a rank describes {len(own)} of them in {len(pickle.dumps(own)) / 1e3:.0f} kB, which "
        f"takes {seconds:.3f} s; rank 0 hears {heard / 1e6:.2f} MB from {len(children)} ranks, and joins it, and packs "
        f"an index of {len(content) / 1e6:.2f} MB, in {joining:.2f} s"
    )


def main(directory: Path, largest: int, units: int) -> None:
    gc.disable()
    print(
        f"{units} units of {len(shapes(1))} parameters with two states each. Of ranks other than 0 the largest numbers."
    )
    for size in (*(size for size in SIZES if size < largest), largest):
        gc.collect()
        root, before = directory / str(size), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def action(rank: int, network: Network, size: int = size, root: Path = root) -> list[Cost]:
            return costs_of(rank, size, network, root, units)

        results = on_all(size, action)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        made = next(root.glob("checkpoint_*"))
        nbytes = [(made / name).stat().st_size / 1e3 for name in (files.INDEX, files.MANIFEST, files.rank_name(1))]
        print(
            f"\n{size} ranks: {peak / size:.2f} MB of memory a rank, {size} of which are in one process; index ", end=""
        )
        print(f"{nbytes[0]:.1f} kB, manifest {nbytes[1]:.1f} kB, rank 1's file {nbytes[2]:.1f} kB")
        for number, call in enumerate(("save", "save again", "load")):
            others = [costs[number] for costs in results[1:]]
            median = statistics.median(cost.seconds for cost in others)
            print(f"  {call:21}  rank 0: {_cost(results[0][number])}")
            print(f"  {'':21}  others: {_cost(Cost(*map(max, zip(*others))))}, median {median:.3f} s", flush=True)
        shutil.rmtree(root)
        for called, form in (("rows", Rows()), ("rank 0", Full(rank0_only=True))):
            for rank in (0, size // 2):
                first, again = moved(rank, size, units, form)
                again_too = f"{again.seconds:.4f} s when the geometry is known"
                print(f"  to {called:6}  rank {rank:4}: {_cost(first)}; {again_too}", flush=True)
        plan_of_large_model(size, 128, 25_516)  # 10^12 parameters


def _cost(cost: Cost) -> str:
    size = f"{cost.sent / 1e3:7.1f} kB sent in {cost.messages} messages, {cost.received / 1e3:7.1f} kB received"
    return f"{cost.seconds:6.3f} s, {size}"
