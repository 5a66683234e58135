"""A deterministic simulation of the whole service: real code, virtual time, and faults drawn from a seed.

What runs is production code: coordinator, Lua scripts, worker servicers, epoch fence, engine schedule and cached
tokens, the client's connection. What is simulated: the event loop's time (`loop`), processes that are killed, stopped
and continued (`processes`), the network between them (`network`, `calls`), the store's server (`store`), and the
models (`engine`). `world` runs one seed, `faults` decides what goes wrong, `ledger` checks the invariants.

    python -m tests.simulation --seeds 1000
"""
