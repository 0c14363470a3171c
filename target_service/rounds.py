"""The rounds of one session: those that are asked for, and those that the target begins by itself. Decides; knows no epochs and no streams.

Rules (the words are those of target.proto)

- Rounds of an epoch count from 1 and rise by one after the result of each Step. What was told under the last one is stored, so the same
  round again gets the same answers. A round that waits or runs is answered once, however often it was asked: running, the newer block is
  ignored; waiting, it replaces the older one when it begins with it. Every other answer leaves the round open.
- "Running" is a Step whose block is in the engine. A Step between two pieces of its prefill still waits: it may expire and be closed.
- At the boundary, where a result was decided and the generation has not ended, the target goes on by itself: with what an Ahead proposes
  there, else with a plain row while the Step's run_ahead lasts. Its results carry the last Step's round. With neither it rests. It rests
  too where nobody listens, where the session holds no KV, and after MAX_ROUND_RESULTS results without a Step.
- A round of its own has no deadline: it is bounded by run_ahead and by what was proposed. It is a round like any other to the engine, and
  it replaces nothing: a Step of the next round replaces it while it waits, and waits for its result while it runs.
- So a Step may name fewer committed tokens than are decided. As long as it names at least those of the last Step's own result and they
  agree, the others were told and stand: they take the place of the proposals that foresaw them, and where one differs the rest of the
  block is void. Any other history is an edit: it takes the place of what was decided.
- An Ahead that comes late is as good as one in time: a session that rests, or whose plain row still waits, goes on with it.
- Once a result ended the generation, a Step that edits nothing is told so again.
"""

from __future__ import annotations

from collections.abc import Iterator

from specdec.errors import InvalidRequest
from specdec.terms import (
    MAX_ROUND_RESULTS,
    Ahead,
    Answer,
    DraftDistribution,
    Expired,
    Failed,
    FinishReason,
    NoRoom,
    PrefixNeeded,
    RejectionMethod,
    Result,
    StaleRound,
    Step,
)
from target_service.answers import Answers
from target_service.checks import Limits, check_distributions, check_step
from target_service.plan import Decided
from target_service.room import Room
from target_service.sessions import Held, Pending, Session

INVALID_ARGUMENT = 3  # gRPC status code number
FOREVER_MS = float("inf")


class Rounds:
    """`numbers` orders arrivals."""

    def __init__(self, limits: Limits, room: Room, answers: Answers, numbers: Iterator[int]) -> None:
        self._limits, self._room, self._answers, self._numbers = limits, room, answers, numbers

    # ------------------------------------------------------------ asked for

    def ask(self, session: Session, stream: int, step: Step, now_ms: float) -> None:
        """A Step of the session's present epoch. Raises InvalidRequest for one that cannot be; then nothing has changed."""
        if step.round == session.round and session.told:
            return self._answers.add(stream, *session.told)
        if step.round <= session.round:
            return self._answers.say(stream, step, StaleRound(session.round))
        check_step(step, self._limits)
        if step.round > session.round + 1:
            raise InvalidRequest("step.round", f"the next round is {session.round + 1}, got {step.round}")
        if step.begin is not None and step.begin != session.begin:
            raise InvalidRequest("step.begin", "differs from that of the epoch's first Step; raise the epoch")
        check_distributions(step, session.begin, self._limits)
        pending = session.pending
        if pending is None or (pending.own and not pending.scoring):
            return self.enqueue(session, step, now_ms, now_ms)
        if pending.own:
            return self._hold(session, step, now_ms)
        pending.deadline_ms = max(pending.deadline_ms, now_ms + step.remaining_ms)
        block, distributions = unsaid(step, session)
        if not pending.scoring and len(block) > len(pending.block) and block[: len(pending.block)] == pending.block:
            self._set_block(session, pending, block, distributions)

    def enqueue(self, session: Session, step: Step, arrived_ms: float, now_ms: float) -> None:
        """A Step's round: take over the committed tokens, or say what stands in the way."""
        base, committed = step.base_length, step.tokens[: len(step.tokens) - step.num_proposed]
        if session.begin.prompt_length > base + len(committed):
            raise InvalidRequest("step.tokens", "the committed tokens must not be fewer than the prompt's")
        session.asked_ms = now_ms
        if session.resident is None and not self._room.house(session, base + len(committed), now_ms):
            return self._answers.tell(session, step.round, NoRoom(self._limits.retry_after_ms))
        agrees = base <= len(session.tokens) and session.hash_at(base) == step.base_hash
        if base > 0 and (base > session.kv_length or not agrees):
            return self._answers.tell(session, step.round, PrefixNeeded(session.kv_length if agrees else 0))
        block, distributions = unsaid(step, session)
        if not session.knows(base, committed):
            session.rebase(base, committed)
        if session.ended is not None:
            return self._conclude(session, step.round, session.ended)
        decides = self._left(session) > 0
        if not decides and not session.unscored:
            return self._conclude(session, step.round)
        deadline_ms = arrived_ms + step.remaining_ms
        session.pending = Pending(step.round, (), (), arrived_ms, deadline_ms, next(self._numbers), decides=decides)
        session.pending.run_ahead, session.credit = min(step.run_ahead, self._limits.max_run_ahead), 0
        self._set_block(session, session.pending, block, distributions)

    def _hold(self, session: Session, step: Step, now_ms: float) -> None:
        """It waits until the round of the target's own that is in the engine is decided."""
        deadline_ms = now_ms + step.remaining_ms
        if session.held is None:
            session.held = Held(step, now_ms, deadline_ms)
            return
        session.held.deadline_ms = max(session.held.deadline_ms, deadline_ms)
        if carries_on(step, session.held.step):
            session.held.step = step

    def _set_block(
        self, session: Session, pending: Pending, block: tuple[int, ...], distributions: tuple[DraftDistribution | None, ...] = ()
    ) -> None:
        """Proposals that can count: the target's own token comes after the last of them. An Ahead keeps one also where none can, so that
        its result is told from a plain one."""
        most = max(int(pending.own), min(self._left(session), self._limits.max_step_rows) - 1)
        pending.block, pending.distributions = block[:most], distributions[:most]

    def _left(self, session: Session) -> int:
        """Tokens that may still be decided: by the window, and by the request."""
        assert session.begin.sampling.max_tokens is not None
        output = len(session.tokens) - session.begin.prompt_length
        return min(self._limits.window - len(session.tokens), session.begin.sampling.max_tokens - output)

    # ------------------------------------------------------------ the target's own

    def ahead(self, session: Session, ahead: Ahead, now_ms: float) -> bool:
        """A continuation may wait here. Returns whether the session, which rested, goes on with it. Raises InvalidRequest."""
        if session.begin.rejection_method is not RejectionMethod.COUPLED:
            raise InvalidRequest("ahead", "goes with rejection_sample_method coupled only; send a Step")
        session.aheads.put(ahead)
        pending = session.pending
        if pending is None:
            self._begin_own(session, now_ms)
        elif pending.own and not pending.scoring and not pending.block:
            self._set_block(session, pending, self._foreseen(session))
        return pending is None and session.pending is not None

    def go_on(self, session: Session, now_ms: float) -> None:
        """The boundary: a result was decided. The Step that waited for it comes first."""
        held, session.held = session.held, None
        if held is None:
            return self._begin_own(session, now_ms)
        try:
            self.enqueue(session, held.step, held.arrived_ms, now_ms)
        except InvalidRequest as error:
            self._answers.tell(session, held.step.round, Failed(INVALID_ARGUMENT, str(error), drop=False))
        else:
            if session.pending is not None:
                session.pending.deadline_ms = held.deadline_ms

    def _begin_own(self, session: Session, now_ms: float) -> None:
        if session.resident is None or not 0 < len(session.told) < MAX_ROUND_RESULTS:
            return
        if session.ended is not None or self._left(session) <= 0:
            return
        block = self._foreseen(session)
        if block or session.credit > 0:
            pending = Pending(session.round, (), (), now_ms, FOREVER_MS, next(self._numbers), own=True)
            self._set_block(session, pending, block)
            session.pending = pending

    def _foreseen(self, session: Session) -> tuple[int, ...]:
        return session.aheads.fit(session.tokens, session.hash_aside)[: self._limits.max_num_speculative_tokens]

    def silence(self, session: Session) -> None:
        """Nobody listens: what waits is dropped, and with it all that the target might go on with. What runs finishes."""
        if session.pending is not None:
            session.pending.run_ahead = 0
            if not session.pending.scoring:
                session.pending = None
        session.held, session.credit = None, 0
        session.aheads.clear()

    # ------------------------------------------------------------ the end of a round

    def decided(self, session: Session, pending: Pending, decided: Decided) -> None:
        result = Result(
            prefix_length=len(session.tokens),
            kv_length_after=decided.kv_length,
            num_verified=decided.num_verified,
            num_accepted=decided.num_accepted,
            tokens=decided.tokens,
            logprobs=decided.logprobs,
            forced=decided.forced,
            finish=decided.finish,
            stop_token_id=decided.stop_token_id,
            prompt_logprobs=(*session.prompt_logprobs, *decided.prompt_logprobs),
        )
        session.tokens.extend(decided.tokens)
        session.kv_length = decided.kv_length
        if not pending.own:
            session.credit = pending.run_ahead
        elif not pending.block:
            session.credit -= 1
        self._end(session, pending.round, result, pending.queue_us(), pending.own)

    def conclude(self, session: Session, pending: Pending) -> None:
        """Nothing may be decided any more: the round ends without a decision of the engine."""
        self._conclude(session, pending.round, queue_us=pending.queue_us())

    def _conclude(self, session: Session, round_: int, ended: Result | None = None, queue_us: int = 0) -> None:
        """With the end that was told already, or because nothing is left."""
        finish, stop = (FinishReason.LENGTH, None) if ended is None else (ended.finish, ended.stop_token_id)
        entries = tuple(session.prompt_logprobs)
        result = Result(len(session.tokens), session.kv_length, 0, 0, (), finish=finish, stop_token_id=stop, prompt_logprobs=entries)
        self._end(session, round_, result, queue_us)

    def _end(self, session: Session, round_: int, result: Result, queue_us: int, own: bool = False) -> None:
        """The one place where a round ends: its result is stored, and told to whoever listens."""
        answer = Answer(session.key[1], session.epoch, round_, result, queue_us)
        session.pending = None
        session.prompt_logprobs.clear()
        if not own:
            session.told.clear()
            session.floor = len(session.tokens)
        session.told.append(answer)
        session.round = round_
        session.ended = result if result.finish is not None else None
        if session.stream is not None:
            self._answers.add(session.stream, answer)

    def expire(self, session: Session, now_ms: float) -> None:
        """Steps that wait too long. What the target began by itself has no deadline."""
        pending, held = session.pending, session.held
        if pending is not None and not pending.scoring and now_ms >= pending.deadline_ms:
            self._answers.tell(session, pending.round, Expired(), pending.queue_us())
            session.pending = None
        if held is not None and now_ms >= held.deadline_ms:
            self._answers.tell(session, held.step.round, Expired())
            session.held = None


def unsaid(step: Step, session: Session) -> tuple[tuple[int, ...], tuple[DraftDistribution | None, ...]]:
    """The Step's proposals that stand behind all that is decided, with their distributions; none once one of them differs from it. Those of
    a Step that names another history are all of them."""
    first = len(step.tokens) - step.num_proposed
    block, distributions = step.tokens[first:], step.distributions
    if session.knows(step.base_length, step.tokens[:first]):
        since = tuple(session.tokens[step.base_length + first :])
        if block[: len(since)] != since:
            return (), ()
        block, distributions = block[len(since) :], distributions[len(since) :]
    return block, distributions


def carries_on(step: Step, other: Step) -> bool:
    """Does the Step begin with all that the other one says, and say more?"""
    start = max(step.base_length, other.base_length)
    said, known = step.tokens[start - step.base_length :], other.tokens[start - other.base_length :]
    return len(said) > len(known) and said[: len(known)] == known
