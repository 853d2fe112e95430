"""Instruments of the test suite.

pool            rank processes kept for the whole run: `run_ranks(world_size, fn, ...)`
template        forks those processes from one that has imported what they need
threads         ranks as threads of the test's own process: `run_threads(world_size, fn, ...)`
models          the model zoo: small models whose sizes never divide
shapes          small models in the shapes of the libraries that users bring
handout         pytest plugin of scripts/run_tests.py
random_models   random models, ways to wrap them and passes; `random_programs` runs them wrapped and plain
pairs           fewer cases than a product has, in which still every two values meet
passes          what tests of backward passes share: modes by turns, a small model, looks at its units
oracle          the same training steps without sharding, and comparisons that name what differs
process_groups  record, delay and poison collectives
meter           live bytes as the allocator sees them
poison          fresh memory filled with NaN
"""
