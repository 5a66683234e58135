"""Channels to the workers: one name, many servers, a session always at the same one."""

import json

import grpc

from specdec.channel import CHANNEL_OPTIONS, QUICK_PINGS, Pings
from specdec.reloading_channel import ReloadingChannel
from specdec.tls import TlsContents
from specdec.watched import Watched

SESSION_METADATA_KEY = "x-session-id"  # what ring_hash hashes


def open_worker_channel(
    address: str,
    service: str,
    tls: Watched[TlsContents] | None = None,
    tls_name: str | None = None,
    pings: Pings = QUICK_PINGS,
) -> grpc.aio.Channel:
    """Return a channel over all workers at `address`: healthy ones only, a session always to the same one.

    `tls`: their authorities and our certificate; None: plain text. `tls_name`: the name in their certificates; None:
    the host of the address.
    """
    policy = {"ring_hash_experimental": {"requestHashHeader": SESSION_METADATA_KEY}}
    config = {"loadBalancingConfig": [policy], "healthCheckConfig": {"serviceName": service}}
    options: tuple[tuple[str, str | int], ...] = (
        *CHANNEL_OPTIONS,
        *pings.options(),
        ("grpc.service_config", json.dumps(config)),
    )
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls_name:
        options = (*options, ("grpc.ssl_target_name_override", tls_name))
    return ReloadingChannel(tls, lambda credentials: grpc.aio.secure_channel(address, credentials, options=options))
