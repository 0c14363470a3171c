"""gRPC options of both ends of every hop, in one place, since they only make sense together.

Keepalive: both ends ping after 12 s without traffic and give a connection up when a ping goes 28 s without its answer. It is ping_timeout
that says so, for every ping: the core library never starts the timer of keepalive_timeout (grpc/grpc#34647), and has one ping under way at
a time, often one that measures the bandwidth, which by default is waited for a minute. What keepalive_timeout does bound is how long the
kernel waits for bytes to be acknowledged (TCP_USER_TIMEOUT). A server tolerates pings 10 s apart, also without a call; Python's default of
300 s would answer our own clients with GOAWAY too_many_pings (grpc/grpc#9902). Outside clients may ping every 10 s or slower.
Size: 64 MB a message, both ways, both ends of an inner hop, and nothing is unlimited. What clients send is less: two million ids, text and
a grammar fit into 16 MB, and a message that is read takes several times its size.
Pending: a surge of calls that comes faster than Python can take them waits in the core library. Beyond what may wait there calls are
CANCELLED without a word, so it is as long as a burst may be and as a busy process can refuse within some four seconds (decision 21).
Resets: calls that are begun and reset at once (CVE-2023-44487) wait there as well. One connection has no more than MAX_CONNECTION_CALLS,
which leaves room for the calls of others; what it begins beyond is refused by RST_STREAM, and Python never hears of it.
Proxies: gRPC dials through the one that https_proxy names, as a client may have to; services dial each other `direct`ly.
Back-off: a lost server is tried again after at most 2 s, so that a restart costs seconds and not the default's two minutes.
"""

from __future__ import annotations

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 << 20
MAX_CALL_BYTES = 16 << 20  # of one message of a client
KEEPALIVE_TIME_MS = 12_000
KEEPALIVE_TIMEOUT_MS = 10_000
PING_TIMEOUT_MS = 28_000  # pings wait behind what is being sent: 4 MB in the kernel's hands at 1.2 Mbit/s
MIN_PING_INTERVAL_MS = 10_000  # the fastest ping a client of ours, or anybody's, may send
MAX_RECONNECT_BACKOFF_MS = 2_000
MAX_PENDING_CALLS, MOST_PENDING_CALLS = 4096, 5120  # that a busy process has not looked at yet: beyond, ever more are cancelled, then all
MAX_CONNECTION_CALLS = 4000  # of one connection, those that its client has reset and Python not yet let go of among them
MAX_PENDING_S = 30  # until the process looks at a call; then it is cancelled

Options = list[tuple[str, int]]

_SIZES: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
_KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def server_options(most_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """`most_bytes` = of a message that comes in."""
    return [
        *_SIZES[:1],
        ("grpc.max_receive_message_length", most_bytes),
        *_KEEPALIVE,
        # The core library's name for what the C macro calls MIN_RECV_PING_INTERVAL; "…min_recv_ping_interval…" is not read by anyone.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
        ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_S),
    ]


def channel_options() -> Options:
    return [
        *_SIZES,
        *_KEEPALIVE,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.use_local_subchannel_pool", 1),  # a channel of its own: one peer's trouble is not another's back-off
    ]


def open_channel(
    endpoint: str, tls: grpc.ChannelCredentials | None = None, server_name: str = "", *, direct: bool = False
) -> grpc.aio.Channel:
    """A lazy channel to `host:port`, in plain text without `tls`. `server_name` = whose certificate to expect, empty = the host's.
    `direct` = through no HTTP proxy, whatever the environment names. Call it inside the running loop; close it there."""
    options = [*channel_options(), ("grpc.enable_http_proxy", int(not direct))]
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    name = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return grpc.aio.secure_channel(endpoint, tls, options=[*options, *name])
