"""Run random programs in which one rank differs at one place: every rank must get an error soon, and then continue.

    python scripts/fuzz_ranks.py --count 500 --seed 0 [--exits 50]

Prints each violation with the program and the seed, and exits with 0 only if there is none. The programs are those of
`tests/harness/differing.py`; `tests/test_differing_ranks.py` runs some of them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness.differing import Outcome, Program, faults, run_programs
from tests.harness.pool import Died, RankFailure, run_fresh, run_ranks, shutdown

BATCH = 10  # programs per job


def ranks_of(seed: int) -> int:
    """Return the number of ranks of a program, which is the same for all seeds of a job."""
    return 3 - seed // BATCH % 2


def run(seeds: list[int], *, exits: bool) -> int:
    """Run the programs; return the number of violations."""
    size = ranks_of(seeds[0])
    try:
        if exits:
            by_rank = run_fresh(size, run_programs, seeds, True, timeout=90.0)
            outcomes = [[None if isinstance(found, Died) else found[0] for found in by_rank]]
        else:
            by_rank = run_ranks(size, run_programs, seeds, False, timeout=60.0 + 20 * len(seeds))
            outcomes = [list(of_program) for of_program in zip(*by_rank)]
    except RankFailure as failure:
        if len(seeds) > 1:
            return sum(run([seed], exits=exits) for seed in seeds)
        print(f"FAULT {Program.make(seeds[0], size, exits=exits)}\n  {failure}", flush=True)
        return 1
    bad = 0
    for seed, of_program in zip(seeds, outcomes):
        program = Program.make(seed, size, exits=exits)
        found = faults(program, of_program)
        if found:
            bad += 1
            print(f"FAULT {program}", *found, *_words(of_program), sep="\n  ", flush=True)
    return bad


def _words(outcomes: list[Outcome | None]) -> list[str]:
    return [f"(rank {rank}: {outcome.error})" for rank, outcome in enumerate(outcomes) if outcome is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--exits", type=int, default=None, help="how many of them end a process; a tenth if not given")
    options = parser.parse_args()
    exits = options.count // 10 if options.exits is None else options.exits
    seeds, bad, started = list(range(options.seed, options.seed + options.count)), 0, time.monotonic()
    last, rest = seeds[:exits], seeds[exits:]
    for _, batch in itertools.groupby(rest, key=lambda seed: seed // BATCH):
        bad += run(list(batch), exits=False)
    for seed in last:
        bad += run([seed], exits=True)
    shutdown()
    print(
        f"{options.count} programs from seed {options.seed}, {exits} of them with a process that ends: {bad} bad, "
        f"in {time.monotonic() - started:.0f} s"
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
