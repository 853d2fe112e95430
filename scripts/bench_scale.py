"""Measure the host time of one rank among many: no network, one process, torch's fake process group.

    python scripts/bench_scale.py --ranks 8 64 512 4096 --contenders fsdp fsdp1 fsdp2

For each number of ranks a fresh process acts as rank 0. It wraps a chain of ``--units`` units of 12 small parameters
(and a root without parameters) with this package, with torch's FSDP1 and with torch's FSDP2. These and the plain model
take turns, ``--rounds`` times, with two steps each. In the first one collectives are counted, and the second one is
timed. So a timed step follows one of the same model, as in training; the step after another model's would pay for what
that has driven out of the processor's caches.

Two parts are not the engine's and are subtracted: the plain model's time in the same round, and the fake group's work.
That group answers at once, but it writes the whole output, which takes longer with more ranks; this work is timed at
each collective.

The table has, for each contender:

* the milliseconds of wrapping;
* the processor time that sharding adds to a step, in milliseconds per unit (median, fastest and slowest round), that
  relative to FSDP1 (median over rounds), and the group's time;
* the bytes of parameters and gradients that a rank keeps, and the collectives of a step;
* the functions that Python calls per unit and step. Unlike time, this number does not depend on the processor's caches,
  which the fake group's output fills at many ranks.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench import sharded
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

CONTENDERS = ("fsdp", "fsdp1", "fsdp2")
WIDTH = 8  # of the linear layers: small, so that host time dominates
HEAD = ("wrap ms", "unit ms", "fastest", "slowest", "of fsdp1", "group ms", "kB kept", "calls", "Python")


class Unit(nn.Sequential):
    """Six layers with two parameters each."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def wrapped(units: int, contender: str) -> tuple[nn.Module, float]:
    """Return the wrapped model, and the seconds that wrapping took."""
    model: nn.Module = nn.Sequential(*(Unit() for _ in range(units)))
    started = time.process_time()
    if contender != "plain":
        options = {"use_orig_params": True} if contender != "fsdp2" else {}
        model = sharded(model, contender, {Unit}, torch.device("cpu"), **options)
    return model, time.process_time() - started


class GroupTime:
    """A profiler that counts collectives and their seconds, and the other functions that Python calls.

    A collective is timed between the call of torch's C++ and its return. A dispatch mode would run it without autograd,
    in which the fake group takes a third less time.
    """

    NAMES = ("allgather", "all_gather", "reduce_scatter", "allreduce", "all_reduce")

    def __init__(self) -> None:
        self.seconds, self.calls, self.functions = 0.0, 0, 0
        self._began: float | None = None

    def _see(self, frame: Any, event: str, called: Any) -> None:
        self.functions += event in ("call", "c_call")
        if event == "c_call" and any(name in called.__name__ for name in self.NAMES):
            self._began = time.process_time()
        elif event in ("c_return", "c_exception") and self._began is not None:
            self.seconds += time.process_time() - self._began
            self.calls += 1
            self._began = None

    def __enter__(self) -> None:
        sys.setprofile(self._see)

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)


def measure(ranks: int, contenders: list[str], units: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    batch = torch.randn(2, WIDTH)
    found: dict[str, Any] = {}
    steps = {}
    for contender in ("plain", *contenders):
        torch.manual_seed(0)
        model, seconds = wrapped(units, contender)
        local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        nbytes = 2 * sum(p.nbytes for p in local)
        found[contender] = {"wrap": seconds, "bytes": nbytes, "host": [], "group": []}

        def step(model: Any = model) -> None:
            model(batch).sum().backward()
            model.zero_grad()

        for _ in range(3):
            step()
        steps[contender] = step
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for contender, step in steps.items():
            counted = GroupTime()
            with counted:
                step()
            started = time.process_time()
            step()
            ended = time.process_time()
            found[contender]["host"].append((ended - started - counted.seconds) / units)
            found[contender]["group"].append(counted.seconds / units)
            found[contender] |= {"collectives": counted.calls, "functions": counted.functions / units}
    dist.destroy_process_group()
    plain = found.pop("plain")
    for got in found.values():
        got["host"] = [host - bare for host, bare in zip(got["host"], plain["host"])]
        got["functions"] -= plain["functions"]
    return found


def show(ranks: int, found: dict[str, Any]) -> None:
    print(f"\n{f'{ranks} ranks':12}" + "".join(f"{word:>9}" for word in HEAD))
    for contender, got in found.items():
        ratios = [one / other for one, other in zip(got["host"], found.get("fsdp1", got)["host"])]
        seconds = [got["wrap"], statistics.median(got["host"]), min(got["host"]), max(got["host"])]
        cells = [f"{1e3 * each:.3f}" for each in seconds]
        cells += [f"{statistics.median(ratios):.3f}", f"{1e3 * statistics.median(got['group']):.3f}"]
        cells += [f"{got['bytes'] / 1e3:.1f}", str(got["collectives"]), f"{got['functions']:.1f}"]
        print(f"{contender:12}" + "".join(f"{cell:>9}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # the process of one number of ranks
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.contenders, options.units, options.rounds)))
        return
    for ranks in options.ranks:
        given = ["--units", str(options.units), "--rounds", str(options.rounds), "--contenders", *options.contenders]
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(ranks), *given], stdout=subprocess.PIPE, text=True, check=True
        )
        show(ranks, json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
