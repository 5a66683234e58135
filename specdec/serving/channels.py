"""A channel from one service to one server of another."""

import grpc

from specdec.channel import CHANNEL_OPTIONS, QUICK_PINGS, Pings
from specdec.reloading_channel import ReloadingChannel
from specdec.tls import TlsContents
from specdec.watched import Watched


def open_worker_channel(
    address: str, tls: Watched[TlsContents] | None = None, tls_name: str | None = None, pings: Pings = QUICK_PINGS
) -> grpc.aio.Channel:
    """Return a channel to the worker at `address`.

    `tls`: its authorities and our certificate; None: plain text. `tls_name`: the name in its certificate; None: the
    host of the address.
    """
    options: tuple[tuple[str, str | int], ...] = (*CHANNEL_OPTIONS, *pings.options())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls_name:
        options = (*options, ("grpc.ssl_target_name_override", tls_name))
    return ReloadingChannel(tls, lambda credentials: grpc.aio.secure_channel(address, credentials, options=options))
