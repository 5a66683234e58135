"""Channels to a specdec service: message limits, keepalive, reconnection."""

import grpc

MAX_MESSAGE_BYTES = 16 << 20  # between services, and of an answer
MAX_PROMPT_BYTES = 8 << 20
MAX_REQUEST_BYTES = MAX_PROMPT_BYTES + (64 << 10)  # the largest sampling parameters take 32 kB

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """Return a channel to one server: with TLS if credentials are given, else in plain text."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
