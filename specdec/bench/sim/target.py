"""Sessions of a simulated target: rounds that are asked for, and those it begins by itself, by the rules of target.proto. Pure.

It takes whatever it is sent: no limits, no leases, no logits. What it must not do is decide differently from a real one, so everything
that reaches the orchestrator (rounds' numbers, prefixes, what an Ahead or the credit lets it go on with) is as there.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.bench.sim.path import Path
from specdec.v1 import common_pb2, target_pb2

MAX_ROUND_RESULTS = 256
MAX_AHEADS = 32


class Session:
    """`decided` = committed tokens as the target knows them. `broken` counts what the orchestrator sent and the path does not say."""

    __slots__ = (
        "aheads", "answered_at", "block", "broken", "credit", "decided", "end", "epoch", "held", "name", "own", "path", "pending",
        "prefill", "round", "running", "unasked",
    )  # fmt: skip

    def __init__(self, name: str, epoch: int, path: Path, committed: int, max_tokens: int) -> None:
        """`committed` = tokens that the first Step brings: the prompt, and what another target decided behind it."""
        self.name, self.epoch, self.path = name, epoch, path
        self.decided, self.end = committed, path.prompt_length + max_tokens
        self.round = self.credit = self.unasked = self.broken = 0
        self.prefill = committed - 1
        self.pending = self.running = self.own = False
        self.block: tuple[int, ...] = ()
        self.held: target_pb2.Step | None = None  # a Step that came while a round of the target's own ran
        self.aheads: list[tuple[int, tuple[int, ...]]] = []  # prefix length and ids of those that begin on the path
        self.answered_at = 0.0

    def ask(self, step: target_pb2.Step) -> None:
        """A Step of this epoch."""
        if self.running:
            self.held = step
            return
        tokens = tuple(step.tokens)
        committed = len(tokens) - step.num_proposed
        length = step.base_length + committed
        if self.path.agrees(step.base_length, tokens[:committed]) < committed or length > self.decided:
            self.broken += 1
        block = tokens[committed:]
        if length < self.decided:  # results that were on their way when it was written
            since = self.decided - length
            block = block[since:] if self.path.agrees(length, block[:since]) == since else ()
        self.round, self.unasked, self.credit = step.round, 0, step.run_ahead
        self.pending, self.own, self.block = True, False, self._bounded(block)

    def offer(self, ahead: target_pb2.Ahead) -> None:
        if ahead.prefix_length < self.path.prompt_length or self.path.hash_at(ahead.prefix_length) != ahead.prefix_hash:
            return  # it continues what will never be decided
        self.aheads.append((ahead.prefix_length, tuple(ahead.tokens)))
        del self.aheads[:-MAX_AHEADS]
        if not self.pending or (self.own and not self.running and not self.block):
            self.go_on()

    def go_on(self) -> None:
        """At a boundary without a Step: a block that waits, or a plain row on credit."""
        if self.decided >= self.end or not self.round or self.unasked >= MAX_ROUND_RESULTS:
            return
        block = self._fitting()
        if block or self.credit or self.pending:
            if not block and not self.pending:
                self.credit -= 1
            self.pending, self.own, self.block = True, True, block

    def decide(self) -> target_pb2.VerifyAnswer:
        """The running round's result; what follows it is pending then."""
        start = self.decided
        accepted = min(self.path.agrees(start, self.block), self.end - start)
        self.decided = min(start + accepted + 1, self.end)
        answer = target_pb2.VerifyAnswer(
            session_id=self.name,
            epoch=self.epoch,
            round=self.round,
            result=target_pb2.Result(
                prefix_length=start,
                kv_length_after=self.decided - 1,
                num_verified=len(self.block),
                num_accepted=accepted,
                tokens=self.path.upto(self.decided)[start : self.decided],
                finish=common_pb2.FINISH_REASON_LENGTH if self.decided >= self.end else None,
            ),
        )
        self.pending = self.running = False
        self.prefill, self.unasked = 0, self.unasked + 1
        held, self.held = self.held, None
        if held is not None:
            self.ask(held)
        else:
            self.go_on()
        return answer

    def _fitting(self) -> tuple[int, ...]:
        chain: tuple[int, ...] = ()
        left = []
        for length, tokens in self.aheads:
            since = self.decided - length
            if since >= 0:
                if len(tokens) <= since or self.path.agrees(length, tokens[:since]) < since:
                    continue
                rest = tokens[since:]
                if rest[: len(chain)] == chain:
                    chain = rest
            left.append((length, tokens))
        self.aheads = left
        return self._bounded(chain, least=1)

    def _bounded(self, block: Sequence[int], least: int = 0) -> tuple[int, ...]:
        """Proposals that can count. `least` = 1 for those of an Ahead, so that their result is told from a plain one."""
        return tuple(block[: max(least, self.end - self.decided - 1)])
