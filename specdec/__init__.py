"""Exact speculative decoding as gRPC microservices: the heart that the three services share."""
