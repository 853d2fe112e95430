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


def failures(seeds: range, world_size: int) -> dict[int, str]:
    """Run the programs of a range of seeds; return the messages of those that fail."""
    try:
        pool.run_ranks(world_size, random_programs.check_range, seeds, timeout=SECONDS + 5 * len(seeds))
    except pool.RankFailure as failure:
        if len(seeds) == 1:
            return {seeds.start: str(failure)}
        return {key: text for seed in seeds for key, text in failures(range(seed, seed + 1), world_size).items()}
    return {}


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
    begin = time.monotonic()
    for start in range(options.seed, end, BATCH):
        seeds = range(start, min(start + BATCH, end))
        for seed, text in failures(seeds, options.world_size).items():
            failed.append(seed)
            print(f"\nseed {seed} FAILED:\n{random_programs.plan_of(seed, options.world_size)}\n{text}\n", flush=True)
        print(
            f"seeds {options.seed} to {seeds[-1]}: {len(failed)} failed, {time.monotonic() - begin:.0f} s", flush=True
        )
    print(f"{options.count} programs on {options.world_size} ranks, seeds {options.seed} to {end - 1}: ", end="")
    print(f"{len(failed)} failed{': ' if failed else ''}{', '.join(map(str, failed))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
