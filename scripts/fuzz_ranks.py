"""Run random programs in which one rank differs at one place: every rank must get an error soon, and then continue.

    python scripts/fuzz_ranks.py --count 500 --seed 0 [--exits 50] [--hybrid] [--agrees nothing|stop]

With `--agrees` no rank deviates, and none may get an error: the ranks also use other models over the same or fewer
ranks, train one on another thread, and save in the background; with `stop` one rank is stopped for 30 seconds.

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

from tests.harness.differing import AGREES, STOPPED, Outcome, Program, faults, run_programs
from tests.harness.pool import Died, RankFailure, run_fresh, run_ranks, shutdown

BATCH = 10  # programs per job


def run(seeds: list[int], *, exits: bool, hybrid: bool, agrees: str) -> int:
    """Run the programs, all on the same number of ranks; return the number of violations."""
    size, shard_size = (4, 2) if hybrid else (3 - seeds[0] // BATCH % 2, 0)
    each = 20 + STOPPED * (agrees == "stop")
    try:
        if exits:
            by_rank = run_fresh(size, run_programs, seeds, True, shard_size, timeout=90.0)
            outcomes = [[None if isinstance(found, Died) else found[0] for found in by_rank]]
        else:
            arguments = seeds, False, shard_size, agrees
            by_rank = run_ranks(size, run_programs, *arguments, timeout=60.0 + each * len(seeds))
            outcomes = [list(of_program) for of_program in zip(*by_rank)]
    except RankFailure as failure:
        if len(seeds) > 1:
            return sum(run([seed], exits=exits, hybrid=hybrid, agrees=agrees) for seed in seeds)
        print(f"FAULT {Program.make(seeds[0], size, exits=exits, agrees=agrees)}\n  {failure}", flush=True)
        return 1
    bad = 0
    for seed, of_program in zip(seeds, outcomes):
        program = Program.make(seed, size, exits=exits, agrees=agrees)
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
    parser.add_argument("--hybrid", action="store_true", help="four ranks: two replicas of two ranks")
    parser.add_argument("--agrees", choices=AGREES, default="", help="no rank deviates")
    options = parser.parse_args()
    exits = options.count // 10 if options.exits is None else options.exits
    exits = 0 if options.agrees else exits
    seeds, bad, started = list(range(options.seed, options.seed + options.count)), 0, time.monotonic()
    last, rest = seeds[:exits], seeds[exits:]
    for _, batch in itertools.groupby(rest, key=lambda seed: seed // BATCH):
        bad += run(list(batch), exits=False, hybrid=options.hybrid, agrees=options.agrees)
    for seed in last:
        bad += run([seed], exits=True, hybrid=options.hybrid, agrees="")
    shutdown()
    print(
        f"{options.count} programs from seed {options.seed}, {exits} of them with a process that ends: {bad} bad, "
        f"in {time.monotonic() - started:.0f} s"
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
