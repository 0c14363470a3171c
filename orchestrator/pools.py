"""Who is in the two pools. Peers come and go while sessions run; what follows for the sessions is the driver's business.

Rules
1. A peer that is removed takes no new session. Those that it holds finish there, or move when its connection ends. Then its task ends.
2. One that is added again before that stays. One that is added again later is dialled anew.
3. Two processes may follow each other under one address. `uid` tells them apart where the discovery knows: another one means that the
   process behind the old connection is gone, so its sessions lose it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from orchestrator.breaker import Trouble
from orchestrator.discovery import Endpoint, Lookups, Watch, pool_names, sources
from orchestrator.discovery.names import DEFAULT_POOL
from orchestrator.ejection import Ejection
from orchestrator.lateness import Lateness
from orchestrator.peers import DRAFT, TARGET, Dialect, Heard, Listener, Peer
from orchestrator.places import Places
from orchestrator.settings import OrchestratorSettings
from specdec import terms
from specdec.errors import Mismatch, Unavailable
from specdec.runtime.tls import Dialler

FLUSH_S = 0.5  # for the last Close items to leave
MAX_REPLICAS = 256  # of one pool: each is a connection with four tasks
log = logging.getLogger(__name__)


class Home(Protocol):
    """What the pools ask and tell, always on the event loop."""

    @property
    def busy(self) -> bool:
        """Answers depend on the present model."""

    def up(self, pool: Pool) -> None:
        """A replica can take sessions that want one."""

    def heard(self, peer: Peer, heard: Heard) -> None: ...

    def lost(self, pool: Pool, name: str, reason: str) -> None:
        """What the replica `name` held is gone."""

    def forsaken(self, reason: str) -> None:
        """No answer that is under way can go on: nobody serves its model any more."""

    def drains(self, pool: Pool, name: str) -> None:
        """The replica `name` will end its streams soon. Told with every beat until then."""

    def ejected(self, pool: str, name: str, trouble: Trouble) -> None:
        """The replica `name` gets no sessions for a while. Those it holds go on there unless somebody moves them."""

    def again(self, pool: str) -> None:
        """Replicas that were shut out may take sessions that want one."""

    def discovery_failed(self, pool: str, kind: str) -> None:
        """For the metric."""


class Pool:
    """The replicas of one kind, by address."""

    def __init__(self, dialect: Dialect, orchestrator_id: str, listener: Listener, ejection: Ejection) -> None:
        self.name, self.ejection = dialect.pool, ejection
        self.peers: dict[str, Peer] = {}
        self.dialler: Dialler | None = None  # None = replicas are dialled in plain text
        self.pool_names: tuple[str, ...] = ()  # those that entries name, sorted, whether or not there is a replica
        self.places = Places(self.eligible, self._vacated, ejection.took)
        self._dialect, self._orchestrator_id, self._listener = dialect, orchestrator_id, listener
        self._lateness = Lateness()
        self._uids: dict[str, str] = {}
        self._leaving: set[str] = set()
        self.draining: set[str] = set()  # connected ones that said so
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._running = self._crowded = False
        self._fell_s = time.monotonic()  # when the last one lost its connection

    def __iter__(self) -> Iterator[Peer]:
        """Also from the thread that reads metrics, while peers come and go."""
        return iter(list(self.peers.values()))

    @property
    def connected(self) -> list[Peer]:
        return [peer for peer in self if peer.connected]

    def eligible(self) -> list[Peer]:
        """Those that may take a session now. Where all targets are shut out any is better than none; without a draft there is a way."""
        there = [peer for peer in self if peer.connected and not self.leaves(peer.name)]
        fit = [peer for peer in there if self.ejection.allows(peer.name)]
        return fit or (there if self._dialect is TARGET else [])

    def leaves(self, name: str) -> bool:
        """Whether it takes no session any more: it drains, or is no longer a member. Also from the thread that reads metrics."""
        return name in self._leaving or name in self.draining

    @property
    def serves(self) -> bool:
        """Whether a replica is there, stays, and is not shut out. Also from the thread that reads metrics."""
        return any(peer.connected and not self.leaves(peer.name) and self.ejection.closed(peer.name) for peer in self)

    def send(self, name: str, item: Any) -> None:
        """Queues an item for a replica. One that is gone needs none."""
        if (peer := self.peers.get(name)) is not None:
            peer.send(item)

    def heard(self, name: str, beat: Any) -> bool:
        """A load report. Whether the replica drains."""
        self.places.heard(name, beat)
        if beat.draining and name not in self.draining:
            self.draining.add(name)
            log.info("peer drains", extra={"pool": self.name, "peer": name})
        return name in self.draining

    def round(self, name: str, late: bool) -> None:
        """A round wanted the block of this draft; `late`: it went without. Where no other is far better that is no reason to shut it out:
        nobody waited, how much is asked of it follows from what comes in time, and a slow machine's first rounds are all late."""
        self._lateness.round(name, late, self.places.sessions[name])
        if late and (better := self._lateness.far_better(name)) and any(peer.name in better for peer in self.eligible()):
            self.ejection.bad(name, Trouble.LATE)

    def stalled(self, name: str) -> None:
        """A session waited for this draft as long as is allowed, in vain. Where others are known and none is far better, all are slow."""
        others = {peer.name for peer in self.eligible()} - {name}
        if not others or others.difference(self._lateness.known()) or others.intersection(self._lateness.far_better(name)):
            self.ejection.bad(name, Trouble.STALL)

    def ejected(self, name: str) -> None:
        """It was shut out. What led to that is of the past once its pause is over: a probe is to show what it is worth then."""
        self._lateness.forget(name)

    def fell(self, name: str) -> None:
        """Its connection ended. One that drained had said so."""
        if name not in self.draining:
            self.ejection.bad(name, Trouble.LOST)
        self.draining.discard(name)
        self.places.gone(name)
        self._fell_s = time.monotonic()

    def empty_s(self) -> float:
        """How long no replica has been connected. 0 while one is."""
        return 0.0 if self.connected else time.monotonic() - self._fell_s

    # --- membership ---------------------------------------------------------------------------------------------------

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Membership is what discovery says; a full set. Of more than MAX_REPLICAS those stay that were here first."""
        there: dict[str, Endpoint] = {}
        for endpoint in sorted(endpoints, key=lambda e: (e.pool_name, e.uid)):  # under one address there is one: the same one each time
            if not endpoint.terminating:
                there[endpoint.address] = endpoint
        for name in set(self.peers) - set(there):
            self.remove(name)
        for name in sorted(there, key=lambda name: (name not in self.peers, name))[:MAX_REPLICAS]:
            self.add(name, there[name].uid, there[name].pool_name)
        if len(there) > MAX_REPLICAS and not self._crowded:
            log.warning("more replicas than are used (MAX_REPLICAS)", extra={"pool": self.name, "replicas": len(there)})
        self._crowded = len(there) > MAX_REPLICAS

    def add(self, name: str, uid: str = "", pool_name: str = DEFAULT_POOL) -> None:
        """`name` is host:port. When it is here, it may change the pool."""
        if name in self.peers and self._uids[name] != uid:
            self._drop(name, "another process has its address")
        self._leaving.discard(name)
        if name in self.peers:
            self.peers[name].pool_name = pool_name
            return
        peer = Peer(name, self._dialect, self._orchestrator_id, self._listener, self.dialler)
        peer.pool_name = pool_name
        self.peers[name], self._uids[name] = peer, uid
        if self._running:
            self._dial(name)

    def remove(self, name: str) -> None:
        """Nothing happens when it is not here."""
        if name in self.peers:
            self._leaving.add(name)
            self._vacated(name)

    def run(self) -> None:
        """Starts dialling. Needs a running loop."""
        self._running = True
        for name in self.peers:
            self._dial(name)

    async def close(self) -> None:
        """Hangs up, once the peers have been told what waits for them."""
        self.ejection.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(peer.flushed() for peer in self)), FLUSH_S)
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _dial(self, name: str) -> None:
        self._tasks[name] = asyncio.create_task(self.peers[name].run(), name=f"peer {name}")

    def _vacated(self, name: str) -> None:
        """It holds no session, as far as we placed them, or may hold none."""
        if name in self._leaving and not self.places.sessions[name]:
            self._end(name)

    def _end(self, name: str) -> None:
        peer, task = self.peers.pop(name), self._tasks.pop(name, None)
        self.ejection.forget(name)
        self._lateness.forget(name)
        self.places.gone(name)
        self.draining.discard(name)
        self._leaving.discard(name)
        del self._uids[name]
        log.info("peer removed", extra={"pool": self.name, "peer": name})
        if task is not None:
            ending = asyncio.create_task(_hang_up(peer, task), name=f"peer {name} leaves")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _drop(self, name: str, reason: str) -> None:
        """Its sessions lose it. They may want a place at once, and are not to find it here."""
        self._leaving.add(name)
        self._listener.down(self.peers[name], reason)
        if name in self.peers:
            self._end(name)


async def _hang_up(peer: Peer, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(peer.flushed(), FLUSH_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _ejection(pool: str, max_pause_s: float, home: Home) -> Ejection:
    return Ejection(pool, max_pause_s, partial(home.ejected, pool), partial(home.again, pool))


class Pools:
    """Both pools, and what is known of the model that they serve. Implements peers.Listener."""

    def __init__(self, settings: OrchestratorSettings, orchestrator_id: str, vocabulary_fingerprint: bytes, home: Home) -> None:
        self.targets, self.drafts = (
            Pool(dialect, orchestrator_id, self, _ejection(dialect.pool, settings.max_ejection_ms / 1000, home))
            for dialect in (TARGET, DRAFT)
        )
        self.targets.dialler = self.drafts.dialler = settings.dialler
        self._fingerprint, self._home = vocabulary_fingerprint, home
        self._wait_s = settings.placement_wait_ms / 1000
        self.on_call: Callable[[str, float, str], None] = lambda method, seconds, code: None  # for the metric
        self._model: terms.ModelInfo | None = None
        self._model_known = asyncio.Event()
        self.model_wanted = 0  # calls that wait for a first target
        lookups, poll_s, keep_s = Lookups(), settings.discovery_poll_ms / 1000, settings.discovery_keep_ms / 1000
        self._watches = []
        for pool, entries in ((self.targets, settings.targets), (self.drafts, settings.drafts)):
            failed = partial(home.discovery_failed, pool.name)
            found = sources(pool.name, entries, lookups, failed, poll_s=poll_s, keep_s=keep_s)
            watch = Watch(pool.name, found, pool.follow, failed)
            pool.pool_names = pool_names(entries)
            pool.follow(watch.known)
            self._watches.append(watch)

    def __iter__(self) -> Iterator[Pool]:
        return iter((self.targets, self.drafts))

    def discovery_ages(self) -> dict[str, float]:
        """How long ago whoever is asked for replicas answered last, s, by pool; none of a pool whose addresses are written down."""
        ages = ((watch.pool, watch.age_s()) for watch in self._watches)
        return {pool: age for pool, age in ages if age is not None}

    def _of(self, peer: Peer) -> Pool | None:
        """None: it was removed, and what it still says is meant for nobody."""
        pool = self.targets if peer.dialect is TARGET else self.drafts
        return pool if pool.peers.get(peer.name) is peer else None

    @property
    def model(self) -> terms.ModelInfo | None:
        """The target's model; None until a target answered for the first time."""
        return self._model

    @property
    def vocab_size(self) -> int:
        """0 until a target answered."""
        return self._model.vocab_size if self._model is not None else 0

    async def model_info(self, wait_ms: float) -> terms.ModelInfo:
        """Waits for a first target. Raises Unavailable."""
        self.model_wanted += 1
        try:
            await asyncio.wait_for(self._model_known.wait(), wait_ms / 1000)
        except TimeoutError:
            raise Unavailable("no target is connected") from None
        finally:
            self.model_wanted -= 1
        assert self._model is not None
        return self._model

    def run(self) -> None:
        """Starts dialling, and looking for more. Needs a running loop."""
        for pool in self:
            pool.run()
        for watch in self._watches:
            watch.run()

    async def close(self) -> None:
        await asyncio.gather(*(watch.close() for watch in self._watches))
        await asyncio.gather(*(pool.close() for pool in self))

    # --- peers speak --------------------------------------------------------------------------------------------------

    def accept(self, peer: Peer, info: terms.ModelInfo) -> None:
        if info.vocabulary_fingerprint != self._fingerprint:
            raise Mismatch(f"{peer.dialect.pool} {peer.name} serves {info.model!r}, whose vocabulary is not the tokenizer's")
        known = self._model
        if peer.dialect is not TARGET or known is None or info.goes_on_at(known):
            return
        if self.targets.connected or (self._home.busy and self.targets.empty_s() < self._wait_s):
            other = "another model of that name" if info.model == known.model else f"answers of {known.model!r}"
            raise Mismatch(f"target {peer.name} serves {info.model!r}; {other} cannot go on there")
        self._model = None  # what is admitted from here on is for the one that comes up
        self._model_known.clear()
        self._home.forsaken(f"the targets serve {info.model!r} by now, another model than this answer began with; ask again")

    def up(self, peer: Peer) -> None:
        if (pool := self._of(peer)) is None:
            return
        log.info("peer up", extra={"pool": pool.name, "peer": peer.name})
        if pool is self.targets:
            self._target_up()
        self._home.up(pool)

    def _target_up(self) -> None:
        """What is admitted must fit every target it may come to."""
        infos = [peer.info for peer in self.targets.connected if peer.info is not None]
        window, most = min(i.max_model_len for i in infos), min(i.max_num_speculative_tokens for i in infos)
        self._model = replace(infos[0], max_model_len=window, max_num_speculative_tokens=most)
        self._model_known.set()
        if len({i.numerics_fingerprint for i in infos}) > 1:
            log.warning("the targets compute differently: an answer that moves between them may differ within rounding")

    def heard(self, peer: Peer, heard: Heard) -> None:
        if (pool := self._of(peer)) is None:
            return
        if heard.beat is not None and pool.heard(peer.name, heard.beat):
            self._home.drains(pool, peer.name)
        self._home.heard(peer, heard)

    def down(self, peer: Peer, reason: str) -> None:
        if (pool := self._of(peer)) is not None:
            log.warning("peer down", extra={"pool": pool.name, "peer": peer.name, "reason": reason})
            pool.fell(peer.name)
            self._home.lost(pool, peer.name, reason)

    def called(self, method: str, seconds: float, code: str) -> None:
        self.on_call(method, seconds, code)

    def trouble(self, peer: Peer, reason: str) -> None:
        log.warning("peer cannot be reached", extra={"pool": peer.dialect.pool, "peer": peer.name, "reason": reason})
