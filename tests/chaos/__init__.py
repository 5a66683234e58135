"""The whole service as real processes over a real Redis, with faults, and clients that check every token.

`tests/simulation` has the same invariants in virtual time, where a seed repeats a world exactly. Here a seed repeats
what goes wrong and where; when it happens depends on the machine.
"""
