"""Run cases on N ranks, each a separate process. A case that hangs or dies is reported, and the remaining cases run.

The driver starts the ranks and prints a line per case: ``ok``, ``WRONG`` (an assertion), ``RAISED``, ``DEVICE`` (an
error on the device), ``HANG`` or ``DIED``. After a failed case the process group may be unusable: the driver starts
new ranks for the following cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.device import lag

ROOT = Path(__file__).resolve().parents[2]
STALL_AT_START = 900.0  # seconds until the first case is finished: on a busy machine ranks start slowly
STALL = 300.0  # seconds without a finished case, after which the ranks are killed
STALL_AFTER_DEATH = 60.0  # the same once one of them has died

Case = Callable[[torch.device], str | None]


def main(script: str, cases: dict[str, Case], *, ranks: int = 2, devices: int = 2) -> None:
    """Drive ``cases`` of the module ``script``, or serve them where this process is one of the ranks.

    Arguments of the command line choose the cases whose names contain one of them. Exits with 1 if a case failed.
    """
    if "LAG_RANK" in os.environ:
        _serve(cases)
    os.environ.setdefault("LAG_DEVICES", str(devices))
    wanted = sys.argv[1:]
    names = [name for name in cases if not wanted or any(part in name for part in wanted)]
    results = drive(script, names, int(os.environ.get("RANKS", ranks)))
    bad = [name for name, text in results.items() if "] ok" not in text]
    print(f"{script}: {len(results)} cases, {len(bad)} failed{': ' if bad else ''}{' '.join(bad)}")
    sys.stdout.flush()
    os._exit(bool(bad) or not results)  # threads of the device may still run


def drive(script: str, names: Iterable[str], ranks: int) -> dict[str, str]:
    """Run the cases ``names`` of the module ``script``; the result line of each."""
    left, results = list(names), {}
    while left:
        with tempfile.TemporaryDirectory() as place:
            finished, ended = _run(script, left, ranks, Path(place))
            results.update(finished)
            left = left[len(finished) :]
            if left and ended:
                print(f"{left[0]:58s} {ended}", flush=True)
                results[left.pop(0)] = ended
    return results


def _run(script: str, names: list[str], ranks: int, place: Path) -> tuple[list[tuple[str, str]], str]:
    """Run ``names`` until all are done or one fails; the finished ones, and how the next one ended where it did not
    finish."""
    processes = []
    for rank in range(ranks):
        own = {"LAG_RANK": rank, "LAG_RANKS": ranks, "LAG_PLACE": place, "LAG_CASES": " ".join(names)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "LAG_EXTENSION": lag.C.__file__}
        environment |= {name: str(value) for name, value in own.items()}
        with open(place / f"out{rank}", "w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", script], env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
            )
        processes.append(process)
    printed, changed = 0, time.monotonic()
    while True:
        running = any(process.poll() is None for process in processes)
        if running:
            time.sleep(0.3)
        finished = _finished(place)
        for name, text in finished[printed:]:
            print(f"{name:58s} {text}", flush=True)
        if len(finished) > printed:
            printed, changed = len(finished), time.monotonic()
        dead = any(process.poll() not in (None, 0) for process in processes)
        if not running or time.monotonic() - changed > (
            STALL_AFTER_DEATH if dead else STALL if printed else STALL_AT_START
        ):
            break
    codes = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    failed = bool(finished) and "] ok" not in finished[-1][1]
    if len(finished) == len(names) or (failed and not any(codes)):
        return finished, ""
    how = "HANG" if all(code is None for code in codes) else f"DIED {codes}"
    tails = ((place / f"out{rank}").read_text()[-1500:].replace("\n", " / ") for rank in range(ranks))
    return finished, f"{how}: {' | '.join(tails)}"


def _finished(place: Path) -> list[tuple[str, str]]:
    """The cases that rank 0 has finished, with their results."""
    lines = (place / "done0").read_text().splitlines() if (place / "done0").exists() else []
    return [(name, text) for name, _, text in (line.partition("\t") for line in lines) if text]


def _serve(cases: dict[str, Case]) -> None:
    """Run the cases that the driver asks for, in a rank's process, up to the first that fails."""
    rank, ranks, place = int(os.environ["LAG_RANK"]), int(os.environ["LAG_RANKS"]), os.environ["LAG_PLACE"]
    torch.set_num_threads(1)
    alone = bool(os.environ.get("LAG_ALONE"))  # the process group serves the device only, and no CPU tensors
    device = lag.init(rank, ranks, f"{place}/store", with_gloo=not alone, device=rank % lag.C.device_count())
    words = dist.new_group(backend="gloo")
    for name in os.environ["LAG_CASES"].split():
        began = time.monotonic()
        text = _run_case(cases[name], device)
        print(f"rank {rank}: {name}: {text}", flush=True)
        every: list[str | None] = [None] * ranks
        try:
            dist.all_gather_object(every, text, group=words)
        except RuntimeError:
            every = [f"DIED   another rank is gone; {text}"]
        bad = [f"rank {other} {its}" for other, its in enumerate(every) if not str(its).startswith("ok")]
        text = "; ".join(bad) if bad else text
        with open(f"{place}/done{rank}", "a") as out:
            out.write(f"{name}\t[{time.monotonic() - began:.1f}s] {text}".replace("\n", " / ") + "\n")
        if bad:
            break
    os._exit(0)  # threads of the device may still run


def _run_case(case: Case, device: torch.device) -> str:
    """The result of one case on this rank: a word, and the case's remark or error."""
    _clear_logs()
    try:
        text = f"ok     {case(device) or ''}"
    except AssertionError as error:
        text = f"WRONG  {error}"
        _trace()
    except BaseException as error:  # a rank reports any error of a case
        text = f"RAISED {type(error).__name__}: {str(error)[:600]}"
        _trace()
    lag.C.set_lateness(0, {})
    lag.C.synchronize(-1)
    errors = lag.C.take_errors()
    if errors:
        text = text.replace("ok     ", "DEVICE ", 1) + f" {len(errors)} errors on the device: {errors[0][:300]}"
    return text


def _trace() -> None:
    if os.environ.get("LAG_TRACE"):
        traceback.print_exc()


def _clear_logs() -> None:
    lag.C.take_errors()
    lag.C.take_syncs()
    lag.C.take_counts()
