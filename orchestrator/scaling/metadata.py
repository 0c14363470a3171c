"""What a ScaledObject's trigger says: which pool, and thresholds of its signals. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from orchestrator.discovery.names import DEFAULT_POOL
from orchestrator.scaling.signals import SIGNALS, Key
from specdec.errors import InvalidRequest

FIELD = "scalerMetadata"
THOUSANDTHS = 1000
MOST_THRESHOLD = 1000.0  # replicas' worth
# What KEDA reads itself and passes on.
KEDAS = {"scalerAddress", "enableTLS", "unsafeSsl", "tlsCertFile", "caCert", "tlsClientCert", "tlsClientKey"}


@dataclass(frozen=True, slots=True)
class Wish:
    """`thresholds` by signal, in thousandths of a replica."""

    key: Key
    thresholds: Mapping[str, int]

    def metric(self, signal: str) -> str:
        return f"specdec-{self.key.pool}-{self.key.pool_name}-{signal}"

    def signal(self, metric: str) -> str:
        """Raises InvalidRequest."""
        for signal in self.thresholds:
            if metric == self.metric(signal):
                return signal
        known = ", ".join(map(self.metric, self.thresholds))
        raise InvalidRequest("metricName", f"{metric!r} is none of this trigger's: {known}")


def wish(metadata: Mapping[str, str], pools: Collection[Key]) -> Wish:
    """Raises InvalidRequest naming the entry. `pools` = those that this orchestrator's settings name."""
    pool = metadata.get("pool", "")
    if pool not in SIGNALS:
        raise InvalidRequest(f"{FIELD}.pool", f"must be {' or '.join(SIGNALS)}, got {pool!r}")
    key = Key(pool, metadata.get("poolName", DEFAULT_POOL))
    if key not in pools:
        names = ", ".join(sorted(known.pool_name for known in pools if known.pool == pool)) or "none"
        raise InvalidRequest(f"{FIELD}.poolName", f"{key.pool_name!r} is no pool of {pool}s here; known: {names} (SPECDEC_{pool.upper()}S)")
    signals = SIGNALS[pool]
    for name in sorted(set(metadata) - KEDAS - {"pool", "poolName", *signals}):
        raise InvalidRequest(f"{FIELD}.{name}", f"is nothing that a {pool} pool can be scaled by; known: {', '.join(signals)}")
    thresholds = {signal: _threshold(signal, metadata[signal]) for signal in signals if signal in metadata}
    if not thresholds:
        raise InvalidRequest(f"{FIELD}.{signals[0]}", f"at least one threshold is needed: {' or '.join(signals)}")
    return Wish(key, thresholds)


def _threshold(signal: str, text: str) -> int:
    remedy = f"must be a number from {1 / THOUSANDTHS} to {MOST_THRESHOLD:g}, in replicas' worth, got {text!r}"
    try:
        value = float(text)
    except ValueError:
        raise InvalidRequest(f"{FIELD}.{signal}", remedy) from None
    if not math.isfinite(value) or not 1 / THOUSANDTHS <= value <= MOST_THRESHOLD:
        raise InvalidRequest(f"{FIELD}.{signal}", remedy)
    return round(THOUSANDTHS * value)
