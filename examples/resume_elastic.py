"""Lose a rank in the middle of a save, continue with one rank more, and end with the same losses.

    python examples/resume_elastic.py

The script trains three times, in CPU processes that it starts:

1. 2 ranks, never interrupted;
2. 2 ranks, of which one is killed in the middle of a save: the other gets an error at once;
3. 3 ranks, from the last whole checkpoint of the second run, to the end.

Then the losses of runs 1 and 3 are compared. `train` shows the part that a training script has to do.
"""

import multiprocessing
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import load, load_plain, save
from fsdp.wrap import ModuleWrapPolicy

STEPS, SAVE_EVERY = 12, 3
KILLED_AT = 9  # in the save after this step
KILLED_BEYOND = 20_000  # bytes; a rank of two saves about 40,000, parameters and optimizer state
BATCH = 12  # rows of all ranks together, in equal parts at 1, 2, 3, 4 or 6 ranks
# Three ranks add the same float64 numbers in a different order than two: each sum is off by about 1e-16 of its size.
# This leaves a factor of 10,000 for the growth of that error in a few steps. A step too many or too few changes a loss
# by 1e-2.
BOUND = 1e-12


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)).double()


def my_part_of_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the batch of `step`, which follows from the step for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 10, dtype=torch.float64, generator=generator)
    mine = inputs[dist.get_rank() :: dist.get_world_size()]
    return mine, mine.sin().sum(dim=1, keepdim=True)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(checkpoints: Path, killed: bool) -> None:
    """Train until `STEPS`, from the latest checkpoint in `checkpoints` if there is one."""
    model = FSDP(make_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress: dict[str, Any] = {"step": 0, "losses": []}
    if (checkpoints / "latest").exists():
        # Every rank reads the local parts, for any number of saving ranks, and returns the `extra`.
        progress = load(checkpoints, model, optimizer)
        if dist.get_rank() == 0:
            print(f"   loaded the checkpoint of step {progress['step']}", flush=True)

    while progress["step"] < STEPS:
        inputs, targets = my_part_of_batch(progress["step"])
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["losses"].append(mean_over_ranks(loss))
        progress["step"] += 1
        if progress["step"] % SAVE_EVERY == 0:
            if killed and progress["step"] == KILLED_AT:
                die_while_writing()
            save(checkpoints, model, optimizer, extra=progress, keep=2)


def die_while_writing() -> None:
    """Have the system kill this process as soon as a file of it grows beyond half of what it has to save."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores the signal
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (KILLED_BEYOND, KILLED_BEYOND))


# -- processes ---------------------------------------------------------------------------------------------------


def run_rank(rank: int, ranks: int, meeting_point: str, checkpoints: Path, killed: bool) -> None:
    """Train in one process; exit with 1 if the training failed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=ranks)
    exit_code = 0
    try:
        train(checkpoints, killed)
    except RuntimeError as error:  # the other ranks cannot go on: their launcher has to start them again
        print(f"   rank {rank} does not hang, it gets the error: {error}", flush=True)
        exit_code = 1
    dist.destroy_process_group()
    sys.exit(exit_code)


def run(ranks: int, checkpoints: Path, kill: int | None = None) -> list[int | None]:
    """Train in `ranks` processes, of which the rank `kill` is to die; return their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["fsdp.checkpoint.load_checkpoint", "torch._dynamo"]
    )  # imported once instead of in each process
    with tempfile.TemporaryDirectory() as directory:
        meeting_point = f"{directory}/meeting_point"
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, meeting_point, checkpoints, rank == kill))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        for process in processes:
            process.kill()  # has no effect on processes that have ended; the others exit with -9
            process.join()
    return [process.exitcode for process in processes]


# -- the three runs ----------------------------------------------------------------------------------------------


def check(condition: bool, problem: str) -> None:
    if not condition:
        raise SystemExit(f"resume_elastic.py: {problem}")


def compare(expected: list[float], found: list[float]) -> None:
    """Print both losses of each step; exit with 1 if they are not the same."""
    print("\nstep   uninterrupted         interrupted           relative difference")
    differences = [abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True)]
    for step, row in enumerate(zip(expected, found, differences, strict=True)):
        print("{:4d}   {:<20.17f}  {:<20.17f}  {:.1e}".format(step, *row))
    check(all(difference <= BOUND for difference in differences), f"the losses differ by more than {BOUND:.0e}")
    print(f"\nthe same losses, to within {BOUND:.0e}")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        uninterrupted, interrupted = Path(directory, "uninterrupted"), Path(directory, "interrupted")
        print("1. 2 ranks, never interrupted", flush=True)
        codes = run(2, uninterrupted)
        check(codes == [0, 0], f"the ranks exited with {codes}")

        print(f"2. 2 ranks; rank 0 is killed while it saves step {KILLED_AT}", flush=True)
        codes = run(2, interrupted, kill=0)
        check(codes == [-signal.SIGXFSZ, 1], f"the ranks exited with {codes}, expected a killed one and an error")
        for path in sorted(interrupted.glob(".*.tmp/*")):
            print(f"   left behind: {path.relative_to(interrupted)}, {path.stat().st_size:,} bytes")
        print(f"   the latest whole checkpoint: {(interrupted / 'latest').read_text().split()[0]}", flush=True)

        print("3. 3 ranks, from the last whole checkpoint", flush=True)
        codes = run(3, interrupted)
        check(codes == [0, 0, 0], f"the ranks exited with {codes}")

        # A checkpoint can also be read without ranks and without a model: here for the `extra` of rank 0.
        expected = load_plain(uninterrupted).extra[0]["losses"]
        found = load_plain(interrupted).extra[0]["losses"]
    compare(expected, found)


if __name__ == "__main__":
    main()
