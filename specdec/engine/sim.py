"""An engine without a model: it says what `specdec/simulation.py` decides, and takes as long as that says. For tests of scale; path,
dtype and fingerprint label it simulated.

A row's logits are zero but for one id, which no temperature and no noise can overrule. So a draft is always sure, whatever its
acceptance.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specdec.engine.api import EngineConfig, EngineInfo
from specdec.engine.batch import Segment, check
from specdec.engine.branches import check_branch, check_cut, check_graft, check_own
from specdec.engine.cache import OutOfRoom
from specdec.hashing import PrefixHash
from specdec.simulation import Simulation, simulation
from specdec.vocabulary import Vocabulary

SURE = 1000.0  # logit of the one id


class _Slot:
    """`walk` = the hash of all its tokens."""

    def __init__(self, tokens: Sequence[int] = (), base: int = 0, parent: _Slot | None = None) -> None:
        self.tokens, self.base, self.parent = list(tokens), base, parent
        self.length, self.walk = len(self.tokens), PrefixHash(self.tokens)
        self.branches: dict[int, _Slot] = {}

    def become(self, tokens: Sequence[int]) -> None:
        self.tokens, self.length, self.walk = list(tokens), len(tokens), PrefixHash(tokens)

    def push(self, token: int) -> int:
        """The hash with it."""
        self.tokens.append(token)
        self.length += 1
        return self.walk.extend((token,)).value


class SimulatedKv:
    """Slots of ids. Room is counted, not shared: a fork books all of its tokens, a branch those of its own."""

    def __init__(self, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self.slots: dict[int, _Slot] = {}
        self._names = itertools.count(1)

    @property
    def used_tokens(self) -> int:
        return sum(slot.length - slot.base for slot in self.slots.values())

    def open(self) -> int:
        return self._add(_Slot())

    def fork(self, slot: int, length: int) -> int:
        parent = self.slots[slot]
        if parent.parent is not None:
            raise ValueError(f"slot {slot} is a branch and cannot be forked")
        if not 0 <= length <= parent.length:
            raise ValueError(f"length {length} must lie within the {parent.length} tokens of slot {slot}")
        return self._add(_Slot(parent.tokens[:length]))

    def branch(self, slot: int, length: int) -> int:
        parent = self.slots[slot]
        check_branch(slot, length, parent)
        name = self._add(_Slot(parent.tokens[:length], length, parent))
        parent.branches[name] = self.slots[name]
        return name

    def graft(self, slot: int, branch: int) -> None:
        parent, grown = self.slots[slot], self.slots[branch]
        check_graft(slot, branch, parent, grown)
        self.close(branch)
        parent.become(grown.tokens)

    def close(self, slot: int) -> None:
        closed = self.slots.pop(slot)
        for name in closed.branches:
            self.slots.pop(name, None)
        if closed.parent is not None:
            closed.parent.branches.pop(slot, None)

    def length(self, slot: int) -> int:
        return self.slots[slot].length

    def truncate(self, slot: int, length: int) -> None:
        cut = self.slots[slot]
        check_cut(slot, length, cut)
        if length < cut.length:
            cut.become(cut.tokens[:length])

    def _add(self, slot: _Slot) -> int:
        name = next(self._names)
        self.slots[name] = slot
        return name


class SimulatedEngine:
    """One thread's, like any engine. `sleep` waits for what a step takes."""

    def __init__(
        self, simulation: Simulation, config: EngineConfig, words: Vocabulary, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._simulation, self._sleep = simulation, sleep
        self._kv = SimulatedKv(config.kv_tokens)
        name = hashlib.blake2b(f"simulated {simulation.seed} {words.size}".encode(), digest_size=16).hexdigest()
        self.info = EngineInfo(
            vocab_size=words.size,
            window=config.window or min(words.max_model_len or config.kv_tokens, config.kv_tokens),
            eos_ids=words.eos_ids,
            dtype="simulated",
            path="sim",
            batch_invariant=True,  # a row depends on its own prefix alone
            numerics_fingerprint=f"simulated-{name}",
            kv_total_tokens=config.kv_tokens,
            max_rows=config.max_rows,
            model_fingerprint=f"simulated-{name}",
        )

    @property
    def kv(self) -> SimulatedKv:
        return self._kv

    @property
    def memory(self) -> Mapping[str, int]:
        return {"weights": 0, "kv": 0, "kv_used": 0}

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        info, kv = self.info, self._kv
        check(segments, kv, vocab_size=info.vocab_size, window=info.window, max_rows=info.max_rows)
        check_own({segment.slot: segment.start + len(segment.tokens) for segment in segments}, kv.slots)
        rows = sum(len(segment.tokens) for segment in segments)
        if kv.used_tokens + rows > kv.total_tokens:
            raise OutOfRoom(f"{rows} tokens more than the {kv.used_tokens} of {kv.total_tokens} in use")
        scored = sum(len(segment.tokens) - segment.logits_from for segment in segments)
        self._sleep(self._simulation.took_ms(scored, rows - scored) / 1000)
        return [self._rows(segment) for segment in segments]

    def _rows(self, segment: Segment) -> Tensor:
        slot = self._kv.slots[segment.slot]
        logits = torch.zeros(len(segment.tokens) - segment.logits_from, self.info.vocab_size)
        for i, token in enumerate(segment.tokens):
            hash_ = slot.push(token)
            if i >= segment.logits_from:
                said = self._simulation.proposes(segment.start + i + 1, hash_, self.info.vocab_size)
                logits[i - segment.logits_from, said] = SURE
        return logits


def simulated_engine(config: EngineConfig, words: Vocabulary) -> SimulatedEngine:
    """`config.simulated` says how. Raises InvalidRequest for what it does not know."""
    return SimulatedEngine(simulation(config.simulated, "SPECDEC_SIM"), config, words)
