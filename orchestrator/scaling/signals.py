"""What the beats of replicas say of their pool. A decider: time is an argument, seconds of one clock.

Every signal is a load in replicas' worth, summed over the pool: 1.0 = one replica fully used, so that desired replicas = load / threshold,
whatever the number of replicas is. Each has a pool of its own that it is about:

target  queue   what Steps wait for each other, in units of `queue_ms`: 1.0 = one replica whose backlog takes that long
        kv      share of the room for keys and values that live sessions hold or wait for, the prefix cache not; at least 1 per replica that
                turns sessions away
draft   needed  share of time in work that some session cannot do without. Not how busy a draft is: idle time goes into branches
        late    share of rounds that ended before there was anything to propose, less what a session alone would cause

Rules
1. Replicas smooth what they say (SPECDEC_SCALING_SMOOTHING_MS); here it is only added up, so every orchestrator says the same.
2. A replica whose beats stopped for SILENT_S is left out. One that drains counts: its load does not go away with it.
3. Of a pool that has no replica the load is 0. Of one that has replicas of which none speaks it is unknown, which is not 0: nobody may
   scale down because the network failed. One that said that it drains before it fell silent is gone, whatever discovery still says.
4. A replica is believed within bounds: what is not a number is 0. A millionth of a replica is 0 as well, or what is smoothed would never
   come to rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.terms import DraftLoad, TargetBeat

SIGNALS = {"target": ("queue", "kv"), "draft": ("needed", "late")}
SILENT_S = 2.0
DIGITS = 6
Beat = TargetBeat | DraftLoad
MOST = {"queue": 1000.0, "kv": 100.0, "needed": 1.0, "late": 1.0}  # of one replica


class Key(NamedTuple):
    """A pool: target or draft, and which of that kind."""

    pool: str
    pool_name: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One that discovery knows. `beat` = its last one on this connection; None: it is not connected, or has said nothing yet."""

    name: str
    key: Key
    beat: Beat | None


class Signals:
    """`pools` = all that the settings name, whether or not they have a replica."""

    def __init__(self, pools: Sequence[Key], queue_ms: float) -> None:
        self.pools, self._queue_ms = tuple(pools), queue_ms
        self._known: dict[Key, list[Beat | None]] = {}
        self._beats: dict[tuple[str, str], tuple[Beat, float]] = {}  # kind and replica → its last beat, since when

    def look(self, replicas: Iterable[Replica], now_s: float) -> None:
        """All replicas that there are."""
        known: dict[Key, list[Beat | None]] = {key: [] for key in self.pools}
        beats: dict[tuple[str, str], tuple[Beat, float]] = {}
        for replica in replicas:
            identity, beat = (replica.key.pool, replica.name), replica.beat
            last, since_s = self._beats.get(identity, (None, now_s))
            if beat is not None:
                beats[identity] = beat, since_s if last is beat else now_s
                if now_s - beats[identity][1] > SILENT_S:
                    beat = None
            elif last is not None and last.draining:
                beats[identity] = last, since_s
                continue
            known.setdefault(replica.key, []).append(beat)
        self._known, self._beats = known, beats

    def load(self, key: Key) -> dict[str, float] | None:
        """By signal. None: it is unknown."""
        known = self._known.get(key, [])
        beats = [beat for beat in known if beat is not None]
        if known and not beats:
            return None
        return {signal: round(sum(self._of(beat, signal) for beat in beats), DIGITS) for signal in SIGNALS[key.pool]}

    def sessions(self, key: Key) -> int:
        """Held by the replicas, those of other orchestrators as well."""
        return sum(beat.sessions for beat in self._known.get(key, []) if beat is not None)

    def _of(self, beat: Beat, signal: str) -> float:
        if isinstance(beat, DraftLoad):
            value = beat.needed_time_share if signal == "needed" else beat.late_demand
        else:
            value = beat.backlog_ms / self._queue_ms if signal == "queue" else beat.kv_demand
        return min(max(value, 0.0), MOST[signal]) if math.isfinite(value) else 0.0
