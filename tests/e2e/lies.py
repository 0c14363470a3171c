"""What a hostile draft says, a table of it: about tokens and names, about distributions, about the service."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import grpc

from specdec.v1 import common_pb2, draft_pb2
from tests.e2e.hostile import Behaviour, HangUp, Held, Said, distribution, honest

VOCAB = 320
K = 3
REJECTED, STALE = "specdec_proposals_rejected_total", "specdec_lookahead_stale_total"

# ---------------------------------------------------------------- lies about tokens and names


def wrong(held: Held, draw: random.Random) -> list[int]:
    """Legal ids, none of them the right one."""
    right = held.ahead(K) or [0] * K
    return [(token + draw.randrange(1, VOCAB - 1)) % VOCAB for token in right]


def ids_at(first: int) -> Behaviour:
    return lambda held, draw: [held.proposal([first] * K), held.proposal([*held.ahead(1), first])]


def too_many(held: Held, draw: random.Random) -> Iterable[Said]:
    yield held.proposal([*held.ahead(2), *(draw.randrange(VOCAB) for _ in range(K + 5))])
    yield held.proposal([draw.randrange(VOCAB) for _ in range(3000)])


def another_session(held: Held, draw: random.Random) -> Iterable[Said]:
    """Right tokens under another's name, with the right prefix of either."""
    for name, other in held.others.items():
        if name != held.open.session_id:
            yield held.proposal(held.ahead(K), session_id=name, epoch=other.open.epoch)
            yield other.proposal(held.ahead(K) or [1, 2])
    yield held.proposal(held.ahead(K), session_id="nobody")
    yield held.proposal(held.ahead(K), session_id="x" * 5000)


def another_epoch(held: Held, draw: random.Random) -> Iterable[Said]:
    for epoch in (0, held.open.epoch + 1, 2**32 - 1):
        yield held.proposal(wrong(held, draw), epoch=epoch)


def another_place(held: Held, draw: random.Random) -> Iterable[Said]:
    """The right hash at the wrong length, the wrong hash at the right length."""
    length = len(held.tokens)
    for wrong_length in (0, length - 1, length + 1, 2**32 - 1):
        yield held.proposal(held.ahead(K) or [5], prefix_length=wrong_length)
    for wrong_hash in (0, 2**64 - 1, draw.getrandbits(64)):
        yield held.proposal(held.ahead(K) or [5], prefix_hash=wrong_hash)


def rewritten_past(held: Held, draw: random.Random) -> Iterable[Said]:
    """True names of older prefixes, followed by what was never decided there."""
    for back in (1, 2, 5):
        if len(held.tokens) > back:
            yield held.proposal(wrong(held, draw) * 3, at=len(held.tokens) - back)


def repeated(held: Held, draw: random.Random) -> Iterable[Said]:
    """The same thing fifty times, then contradictions of it."""
    first = held.proposal([*held.ahead(1), *wrong(held, draw)])
    yield draft_pb2.DraftResponse(events=[first] * 50)
    for _ in range(5):
        yield held.proposal(wrong(held, draw))


def confident(held: Held, draw: random.Random) -> Iterable[Said]:
    for values in ([float("nan")] * K, [-1.0] * K, [7.0] * K, [float("inf")] * K, [0.5]):
        yield held.proposal(wrong(held, draw), confidences=values)


def shapeless(held: Held, draw: random.Random) -> Iterable[Said]:
    """Events of no kind, of a kind from the future, and messages that hold nothing."""
    yield draft_pb2.DraftEvent()
    yield draft_pb2.DraftEvent.FromString(b"\x7a\x03abc")
    yield draft_pb2.DraftResponse()
    yield draft_pb2.DraftResponse(load=draft_pb2.Load(needed_work_share=float("nan"), kv_used_tokens=2**64 - 1))


# ---------------------------------------------------------------- lies about distributions


def distributions(held: Held, draw: random.Random) -> Iterable[Said]:
    """One lie about q at a time, in the first or the last slot."""
    tokens = held.ahead(K) or wrong(held, draw)
    x = tokens[0]
    nan, inf, tiny = float("nan"), float("inf"), 1e-30
    lies = [
        common_pb2.DraftDistribution(ids=[x, 5], probs=b"\0\0\x80?"),
        common_pb2.DraftDistribution(ids=[x], probs=b"\0\0\x80"),
        common_pb2.DraftDistribution(ids=[], probs=b"\0\0\x80?"),
        common_pb2.DraftDistribution(ids=[x], probs=struct.pack(">f", 1.0)),
        distribution([x], [nan]),
        distribution([x, (x + 1) % VOCAB], [inf, 0.0]),
        distribution([x, (x + 1) % VOCAB], [2.0, -1.0]),
        distribution([x], [0.5]),
        distribution([x], [0.0]),
        distribution([x, (x + 1) % VOCAB], [1.0, 1.0]),
        distribution([x, x], [0.5, 0.5]),
        distribution([x, VOCAB], [0.5, 0.5]),
        distribution([x, 2**32 - 1], [1.0, 0.0]),
        distribution([(x + 1) % VOCAB], [1.0]),
        distribution([x, (x + 1) % VOCAB], [tiny, 1.0]),
        distribution(list(range(VOCAB)) * 300, [1 / (300 * VOCAB)] * (300 * VOCAB)),
    ]
    lie, fair = draw.choice(lies), distribution([tokens[-1]], [1.0])
    if len(tokens) == 1 or draw.random() < 0.5:
        yield held.proposal(tokens, distributions=[lie, *(distribution([t], [1.0]) for t in tokens[1:])])
    else:
        last = distribution([tokens[-1], VOCAB + 7], [0.5, 0.5])
        yield held.proposal(tokens, distributions=[*(distribution([t], [1.0]) for t in tokens[:-1]), last])
    yield held.proposal(tokens, distributions=[fair] * (len(tokens) + 2))


# ---------------------------------------------------------------- lies about the service


def resync_storm(held: Held, draw: random.Random) -> Iterable[Said]:
    yield held.resync()


def refused_for_good(held: Held, draw: random.Random) -> Iterable[Said]:
    yield held.refused(0)


def refused_storm(held: Held, draw: random.Random) -> Iterable[Said]:
    yield held.refused(1)
    yield held.refused(2**32 - 1, reason="x" * 100_000)


def crowded(held: Held, draw: random.Random) -> Iterable[Said]:
    """More events than one message may hold."""
    yield draft_pb2.DraftResponse(events=[held.proposal([VOCAB])] * 1500)


def huge(held: Held, draw: random.Random) -> Iterable[Said]:
    """More ids than a list may hold, once per session; and once a message that gRPC itself refuses."""
    if not held.memory.setdefault("told", False):
        held.memory["told"] = True
        yield held.proposal([7] * ((1 << 20) + 1))


def beyond_the_limit(held: Held, draw: random.Random) -> Iterable[Said]:
    if len(held.tokens) - held.open.prompt_length in (5, 6):
        yield held.refused(0, reason="x" * (65 << 20))


def hanging_up(held: Held, draw: random.Random) -> Iterable[Said]:
    if draw.random() < 0.2:
        yield HangUp(draw.choice((None, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)))


@dataclass(frozen=True)
class Lie:
    tell: Behaviour
    counted: str | None = None  # the counter that must show it


LIES = {
    "one past the vocabulary": Lie(ids_at(VOCAB), REJECTED),
    "last id": Lie(ids_at(VOCAB - 1)),
    "2^31-1": Lie(ids_at(2**31 - 1), REJECTED),
    "-1": Lie(ids_at(2**32 - 1), REJECTED),
    "K+5 ids": Lie(too_many),
    "0 ids": Lie(lambda held, draw: [held.proposal([])], REJECTED),
    "another session": Lie(another_session, STALE),
    "another epoch": Lie(another_epoch, STALE),
    "another place": Lie(another_place, STALE),
    "wrong tokens": Lie(lambda held, draw: [held.proposal(wrong(held, draw))]),
    "rewritten past": Lie(rewritten_past, STALE),
    "repeated": Lie(repeated, STALE),
    "confidences": Lie(confident, REJECTED),
    "shapeless": Lie(shapeless, REJECTED),
    "distributions": Lie(distributions, REJECTED),
    "resync storm": Lie(resync_storm),
    "refused": Lie(refused_for_good),
    "refused storm": Lie(refused_storm),
    "crowded": Lie(crowded, REJECTED),
    "huge": Lie(huge, REJECTED),
    "beyond the limit": Lie(beyond_the_limit),
    "hanging up": Lie(hanging_up),
}


def beside_the_truth(lie: Behaviour) -> Behaviour:
    """The lie first, last, or alone."""

    def behave(held: Held, draw: random.Random) -> Iterator[Said]:
        place = draw.randrange(3)
        if place == 0:
            yield from honest(held, draw)
        yield from lie(held, draw)
        if place == 1:
            yield from honest(held, draw)

    return behave
