"""Exact speculative decoding as gRPC microservices: the heart that the three services share."""

import os

# Lets a channel hash on metadata of our choice (gRFC A76): a session returns to the worker that holds its cache.
# grpc reads it once, when it is imported.
os.environ.setdefault("GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY", "true")
