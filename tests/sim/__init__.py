"""A store in one thread and no real time: the protocol's machines under a network that misbehaves from a seed.

    world      virtual clock, events, futures and tasks
    network    connections that delay, break, lose a suffix and deliver the rest late
    server     the real ShardService (and Coordinator, and compiled Shard) behind such connections
    machine    the real Client and its Sessions, as one process that may crash
    plan       what a seed means: mode, sizes, faults
    model      gradients that tell who contributed, and what the values must be if the log is true
    rows       tables of rows, which workers train beside tensors
    actors     what workers, readers and writers do
    assigner   who assigns rows
    follower   who goes from version to version by what has changed
    scenario   one run
    checks     what must hold after it, whatever happened

`python -m tests.sim --help` runs seeds by hand.
"""
