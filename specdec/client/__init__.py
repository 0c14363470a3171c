"""What a Python user imports.

    async with Client("127.0.0.1:50051") as client:
        async for event in client.generate("Once upon a time", SamplingParams(max_tokens=64), seed=7):
            if isinstance(event, Delta):
                print(event.text, end="")

    with SyncClient("127.0.0.1:50051") as client:
        print(client.complete("Once upon a time", SamplingParams(max_tokens=64)).text)

    async with FailoverClient(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:  # an answer that breaks off goes on exactly
        print((await client.complete("Once upon a time", SamplingParams(max_tokens=64))).text)

`client_of("a:1,b:2")` and `SyncClient("a:1,b:2")` take one endpoint or several.

A prompt is text, token ids, or a chat: a list of {"role", "content"}. Everything else a request may carry is a keyword, see `Options`;
where the service speaks TLS or asks for a token, `Client(endpoint, Credentials(…))` says what to show;
the parameters that shape the decisions are in `specdec.terms.SamplingParams`. Failures are raised as specdec.errors. Abandoning the
iterator cancels the generation and frees its room on the servers.
"""

from specdec.client.answers import (
    Completion,
    Delta,
    EffectiveSettings,
    Event,
    Finished,
    ServiceInfo,
    SpeculativeStats,
    Started,
    Usage,
    event_from_wire,
)
from specdec.client.calls import GENERATE_TIMEOUT_S, UNARY_TIMEOUT_S, Client
from specdec.client.credentials import Credentials
from specdec.client.failover import FailoverClient, client_of, endpoints_of
from specdec.client.requests import CallOptions, Options, Prompt, generate_request
from specdec.client.sync import SyncClient

__all__ = [
    "CallOptions",
    "Client",
    "Completion",
    "Credentials",
    "Delta",
    "EffectiveSettings",
    "Event",
    "FailoverClient",
    "Finished",
    "GENERATE_TIMEOUT_S",
    "Options",
    "Prompt",
    "ServiceInfo",
    "SpeculativeStats",
    "Started",
    "SyncClient",
    "UNARY_TIMEOUT_S",
    "Usage",
    "client_of",
    "endpoints_of",
    "event_from_wire",
    "generate_request",
]
