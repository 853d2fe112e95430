"""Instruments of the test suite.

pool            rank processes kept for the whole run: `run_ranks(world_size, fn, ...)`
template        forks those processes from one that has imported torch and the package
threads         ranks as threads of the test's own process: `run_threads(world_size, fn, ...)`
models          the model zoo: small models with sizes that never divide
shapes          small models in the shapes of popular libraries
handout         pytest plugin of scripts/run_tests.py
random_models   random models, wrappings and passes; `random_programs` runs them wrapped and plain
pairs           few cases of a product in which any two values still occur together
passes          helpers of tests of backward passes: modes, a small model, states of units
oracle          the same training steps without sharding, and comparisons that name differences
process_groups  record, delay and poison collectives
meter           live bytes at the allocator
poison          fresh memory filled with NaN
"""
