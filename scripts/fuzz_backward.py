"""Train random models, wrapped in random ways, and compare every gradient and parameter with the plain model's.

    python scripts/fuzz_backward.py [--count 300] [--seed 0] [--world-size 2] [--describe]

Each seed is one program: the modules of the model, which of them are units or checkpointed, and the order of forwards
and backwards. `tests/harness/random_models.py` draws the programs and defines "equal". A seed that fails is printed
with the program in words and the traceback of the rank that failed first; `--seed S --count 1` runs it alone. Exits
with 0 only if none fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness import pool, random_programs

BATCH = 10  # programs per job
SECONDS = 60.0  # for one program, on a loaded machine


def first_failure(seeds: range, world_size: int) -> tuple[int, str] | None:
    """Return the first failing seed and the message; None if none fails."""
    try:
        pool.run_ranks(world_size, random_programs.check_range, seeds, timeout=SECONDS + 5 * len(seeds))
    except pool.RankFailure as failure:
        failed = [seed for seed in seeds if f"seed {seed}: " in str(failure)]
        if failed:
            return failed[0], str(failure)
        if len(seeds) == 1:
            return seeds[0], str(failure)
        return next((found for seed in seeds if (found := first_failure(range(seed, seed + 1), world_size))), None)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--describe", action="store_true", help="print the programs, and do not run them")
    options = parser.parse_args()
    end = options.seed + options.count
    if options.describe:
        for seed in range(options.seed, end):
            print(f"seed {seed}:\n{random_programs.plan_of(seed, options.world_size)}\n")
        return 0
    failed: list[int] = []
    seed, begin = options.seed, time.monotonic()
    while seed < end:
        seeds = range(seed, min(seed + BATCH, end))
        found = first_failure(seeds, options.world_size)
        if found is None:
            seed = seeds.stop
        else:
            failed.append(found[0])
            print(
                f"\nseed {found[0]} FAILED:\n{random_programs.plan_of(found[0], options.world_size)}\n{found[1]}\n",
                flush=True,
            )
            seed = found[0] + 1
        print(f"seeds {options.seed} to {seed - 1}: {len(failed)} failed, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{options.count} programs on {options.world_size} ranks, seeds {options.seed} to {end - 1}: ", end="")
    print(f"{len(failed)} failed{': ' if failed else ''}{', '.join(map(str, failed))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
