"""Channels to the workers: one name, many servers, a session always at the same one."""

import json

import grpc

from specdec.channel import CHANNEL_OPTIONS

SESSION_METADATA_KEY = "x-session-id"  # what ring_hash hashes


def open_worker_channel(address: str, service: str) -> grpc.aio.Channel:
    """Return a channel over all workers at `address`: healthy ones only, a session always to the same one."""
    policy = {"ring_hash_experimental": {"requestHashHeader": SESSION_METADATA_KEY}}
    config = {"loadBalancingConfig": [policy], "healthCheckConfig": {"serviceName": service}}
    options = (*CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(config)))
    return grpc.aio.insecure_channel(address, options=options)
