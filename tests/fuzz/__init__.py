"""The services under what nobody should send: mutated protobuf, raw bytes, workers that lie, clients that leave.

`make fuzz MESSAGES=200000 SEED=1`, or `python -m tests.fuzz`.
"""
