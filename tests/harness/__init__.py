"""Instruments of the test suite.

Processes
    pool             rank processes kept for the whole run: `run_ranks(world_size, fn, ...)`, `on_ranks`
    worker           the process of one rank; `template` forks it from one that has imported torch and the package
    programs         programs in forks of a process that has imported torch alone
    threads          ranks as threads of the test's own process: `run_threads(world_size, fn, ...)`
    fake_group       one rank without peers, whose collectives are no-ops

Models
    models           the model zoo: small models with sizes that never divide
    shapes           small models in the shapes of popular libraries
    small            a small network; also `StandIn`, a process group without processes
    chains, switches, precision, summoned, writes, exports   a model for one subject each
    random_models    random models, wrappings and passes; `random_programs` runs them wrapped and plain
    training_scripts programs of users, as text

References and cases
    twin             a wrapped model next to its plain twin, which takes the same steps on the batches of all ranks
    strategies       the sharding strategies, and the modes in which tests run
    oracle           the same training steps without sharding, and comparisons that name differences
    sharded          training steps under the package, and full tensors assembled from parts
    lockstep         a program compared with a plain replica of every rank after every backward; `passes` has its parts
    agreeing         ranks that deviate from their peers at one step; `differing` draws such programs at random
    states           kinds of state dicts; `optim_states` those of optimizers, beside torch's
    pairs            few cases of a product in which any two values still occur together

Measurement
    process_groups   record, delay and poison collectives
    stream_tracer    races between streams without an accelerator; `traced` has a program for it
    meter            live bytes at the allocator
    poison           fresh memory filled with NaN
    disk             a disk that fails or loses power
"""
