"""One generation as a state machine (states.py): event in, commands out. No await, no clock, no socket, no torch.

Theory. The committed tokens are the only truth, and only a target's result extends them. Everything else may be lost, late,
repeated or wrong without changing them: a proposal is used where its named prefix fits and nowhere else; an answer counts only for
the epoch and round that are open; a target that vanishes is replaced under a higher epoch, from the committed tokens and the seed.

Rules
1. A round opens when its Step is built and closes with its result. Repeating a Step (prefix_needed, no_room, expired) keeps the round.
   What the target decides on its own behind it is told under its number, also while the next Step is on its way.
2. Draft and target are placed independently: losing one never re-opens the other.
3. Where it goes when its target is gone or full, and when it gives up, is in moving.py.
4. A target that says what cannot be is believed nothing of it, and left.
5. The draft hears of every commit, then of the block that follows it; the client's copy goes out behind both.
"""

from __future__ import annotations

from orchestrator import events as ev
from orchestrator.checks import check_result
from orchestrator.drafting import DraftSide
from orchestrator.events import Admitted, Command, Count, StartTimer, StopTimer, Timer, ToTarget
from orchestrator.lookahead import EMPTY, Block
from orchestrator.moving import MAX_EXPIRED, Moving
from orchestrator.pace import Pace
from orchestrator.sources import Sources
from orchestrator.states import State
from orchestrator.tally import SOURCES, Tally, origins, word
from orchestrator.targeting import TargetSide
from specdec import terms
from specdec.errors import ProtocolFault, SpecdecError
from specdec.terms import FinishReason, RejectionMethod, Result

OVERDUE_MARGIN_MS = 500.0  # what an answer may take past the deadline it was given
SILENT_MS = 2000.0  # a target that should go on by itself is asked again after this
STOP_STEP, START_SILENT = StopTimer(Timer.STEP), StartTimer(Timer.STEP, SILENT_MS)


class Generation:
    def __init__(
        self,
        request: Admitted,
        pace: Pace,
        *,
        step_deadline_ms: int = 30_000,
        placement_wait_ms: float = 30_000.0,
        prompt_lookup_min: int = 0,
        max_run_ahead: int = 0,
        ahead: bool = False,
    ) -> None:
        self.request = request
        self.state = State.WAITING if request.fork_session_id else State.PLACING
        self.committed = list(request.tokens)
        self._pace, self._sources = pace, Sources(request, prompt_lookup_min, pace)
        self.lookahead = self._sources.lookahead
        self.tally, self._step_deadline_ms = Tally(request.num_speculative_tokens), step_deadline_ms
        self.at, self.moving = TargetSide(request, max_run_ahead), Moving(placement_wait_ms)
        self._ahead = ahead and request.rejection_method is RejectionMethod.COUPLED
        self.drafting, self._reader_behind = DraftSide(request, pace), False
        self._told: list[Command] = []

    # --- the door -----------------------------------------------------------------------------------------------------

    def begin(self) -> list[Command]:
        """The first commands. Called once."""
        if self.state is State.PLACING:
            self._start()
        return self._take()

    def handle(self, event: ev.Event) -> list[Command]:
        """Applies one event. The commands must be carried out in order. Raises ProtocolFault for an event that cannot be."""
        if self.state is not State.DONE:
            self._apply(event)
        return self._take()

    def _apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.Answered):  # these two in every round: to match a class costs as much as a small method
            return self._on_answered(event.answer)
        if isinstance(event, ev.Drafted):
            return self._on_drafted(event.event)
        match event:
            case ev.PrefixReady(target):
                self._on_prefix_ready(target)
            case ev.TimerFired(timer):
                self._on_timer(timer)
            case ev.TargetPlaced(target):
                self._on_target_placed(target)
            case ev.TargetLost(reason, alive=True):
                if self.target:
                    self._leave_target()
                    self.moving.reason = reason
            case ev.TargetLost():
                self._on_target_lost()
            case ev.DraftPlaced():
                self._tell(*self.drafting.placed(event, self.committed, self.lookahead, self._in_flight()))
            case ev.DraftLost(alive=alive):
                self._tell(*self.drafting.lost(alive))
                self._give_up_waiting()
            case ev.Cancelled():
                self._end()
            case ev.ReaderBehind():
                self._reader_behind = True
            case ev.ReaderCaughtUp():
                self._reader_behind = False
                if self.state is State.HELD:
                    self._next_round()

    @property
    def target(self) -> str:
        """The replica that holds the session; empty = none."""
        return self.at.name

    def _waits(self) -> bool:
        """A round that finds no block waits for the draft."""
        return self._pace.speculates and (self._pace.waits or not self._ahead)

    @property
    def decided(self) -> int:
        """Output tokens, resumed ones included."""
        return len(self.committed) - self.request.prompt_length

    def _tell(self, *commands: Command) -> None:
        self._told += commands

    def _take(self) -> list[Command]:
        told, self._told = self._told, []
        return told

    # --- placement ----------------------------------------------------------------------------------------------------

    def _on_prefix_ready(self, target: str) -> None:
        if self.state is State.WAITING:
            if not target:
                self.at.stands_alone()
            self._start(target)

    def _start(self, prefer: str = "") -> None:
        self._place_target("", prefer)
        self._tell(*self.drafting.want())

    def _place_target(self, avoid: str, prefer: str = "") -> None:
        self.state, self.at.name = State.PLACING, ""
        self._tell(*self.moving.want(avoid, prefer))

    def _on_target_placed(self, target: str) -> None:
        if self.state is State.BACKING_OFF:
            self.tally.replacements += 1
            self._tell(ToTarget(self.target, self.at.close()), *self.moving.for_room())
        elif self.state is State.PLACING:
            self._tell(StopTimer(Timer.PLACEMENT))
        else:
            raise ProtocolFault(f"a target was placed while {self.state.value}")
        self.at.name = target
        self._new_epoch(self.at.epoch + 1)

    def _new_epoch(self, epoch: int) -> None:
        if (error := self.moving.epoch()) is not None:
            return self._fail(error)
        self.at.new_epoch(epoch)
        self._open_round(self._sources.ready()[0], "prefill")

    def _on_target_lost(self) -> None:
        if not self.target:
            return
        self.tally.replacements += 1
        lost = self.target
        self._tell(StopTimer(Timer.STEP), StopTimer(Timer.RETRY), StopTimer(Timer.GRACE), Count("replaced"))
        if (error := self.moving.lost(self.decided)) is not None:
            self.at.name = ""
            return self._fail(error)
        self._place_target(lost)

    # --- the draft ----------------------------------------------------------------------------------------------------

    def _in_flight(self) -> Block | None:
        """The block of the open round."""
        return self.at.block if self.state in (State.VERIFYING, State.GOING, State.BACKING_OFF) else None

    def _on_drafted(self, said: terms.DraftEvent) -> None:
        if said.epoch != self.drafting.epoch or not self.drafting.name:
            self._tell(Count("stale"))
        elif isinstance(said, terms.Proposal):
            self._on_proposal(said)
        elif isinstance(said, terms.Resync):
            self._tell(*self.drafting.resync(self.committed, self.lookahead, self._in_flight()))
            if self.drafting.over:
                self._give_up_waiting()
        else:
            self._tell(*self.drafting.refused(said))
            self._give_up_waiting()

    def _on_proposal(self, proposal: terms.Proposal) -> None:
        if self.lookahead.add(proposal):
            self.drafting.helped()
            self._tell_ahead(self.lookahead.newest())
        else:
            self._tell(Count("stale", len(proposal.tokens)))
        if self.state is State.CHOOSING:
            block, _ = self._sources.ready()
            if self.lookahead.any:  # else what came was for later
                self._tell(StopTimer(Timer.GRACE))
                self._open_round(block, "late" if block.tokens else "off")

    def _give_up_waiting(self) -> None:
        if self.state is State.CHOOSING:
            self._tell(StopTimer(Timer.GRACE))
            self._open_round(EMPTY, "no_draft")

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _next_round(self) -> None:
        if self._reader_behind:
            self.state = State.HELD
        elif choice := self._sources.choose():
            self._open_round(*choice)
        elif not self.drafting.name:
            self._open_round(EMPTY, "no_draft")
        elif not self._waits():
            self._open_round(EMPTY, "miss")
        elif wait_ms := self.drafting.grace_ms(self._pace.grace_ms()):
            self.state = State.CHOOSING
            self._tell(StartTimer(Timer.GRACE, wait_ms))
        else:
            self._open_round(EMPTY, "miss")

    def _open_round(self, block: Block, outcome: str) -> None:
        self.at.new_round(block, outcome, 0 if self._waits() else self.at.going.run_ahead)
        self.tally.opened(outcome)
        self._send_step()
        if not block.own:
            self.lookahead.assume(block.tokens)
        self._tell(*self.drafting.sent(self.lookahead, block))
        self._tell_ahead(self.lookahead.block(2 * self._pace.most + 1))

    def _send_step(self) -> None:
        self.state = State.VERIFYING
        step = self.at.step(self.committed, self.lookahead, self._step_deadline_ms)
        self._tell(ToTarget(self.target, step), StartTimer(Timer.STEP, self._step_deadline_ms + OVERDUE_MARGIN_MS))

    def _tell_ahead(self, chain: Block) -> None:
        """Lets what goes on behind an outcome of the block in flight wait at the target."""
        if self._ahead and self._pace.speculates and self.state in (State.VERIFYING, State.GOING):
            self._offer(self._sources.further(self.at.block, chain))

    def _offer(self, path: Block) -> None:
        if path.tokens and self.at.going.tell(path):
            self._tell(ToTarget(self.target, self.at.ahead(self.lookahead, path)))

    # --- the target answers -------------------------------------------------------------------------------------------

    def _on_answered(self, answer: terms.Answer) -> None:
        if not self.target or answer.epoch != self.at.epoch:
            return  # of a placement that is over
        outcome = answer.outcome
        if isinstance(outcome, Result):
            self._on_result(answer.round, outcome)
        elif answer.round != self.at.round or self.state not in (State.VERIFYING, State.GOING):
            return  # of a round that is over
        elif isinstance(outcome, terms.NoRoom):
            self.state = State.BACKING_OFF
            self._tell(*self.moving.no_room(self.target, outcome))
        elif isinstance(outcome, terms.PrefixNeeded):
            self._on_prefix_needed(outcome.have)
        elif isinstance(outcome, terms.Expired):
            self._on_expired()
        elif isinstance(outcome, terms.StaleEpoch):
            self._begin_again(outcome.current)
        elif isinstance(outcome, terms.Failed):
            self._leave_target_unless(self.moving.failed(outcome, self.decided))
        else:  # it does not know the session, or the round, or closed what we never closed
            self._begin_again()

    def _on_prefix_needed(self, have: int) -> None:
        if have >= self.at.kv_length:  # it was sent more than that: without this the two would repeat themselves for ever
            return self._begin_again()
        self.at.kv_length = have
        self._ask_again()

    def _on_expired(self) -> None:
        self.at.expired += 1
        if self.at.expired < MAX_EXPIRED:
            return self._ask_again()
        self._leave_target_unless(self.moving.overdue(self.decided))

    def _ask_again(self) -> None:
        """The open round once more; the next one, when the target went on by itself."""
        if self.at.open:
            self._send_step()
        else:
            self._next_round()

    def _leave_target_unless(self, error: SpecdecError | None) -> None:
        if error is not None:
            return self._fail(error)
        self._leave_target()

    def _begin_again(self, known: int = 0) -> None:
        """The target wants another epoch. `known` = the newest that it says it has seen."""
        if self.moving.in_vain(known - self.at.epoch):
            return self._leave_target(ev.Misled(self.target, f"it wants an epoch behind {max(known, self.at.epoch)}"))
        self._new_epoch(max(self.at.epoch, known) + 1)

    def _on_result(self, round_: int, result: Result) -> None:
        asked = self.at.open and round_ == self.at.round
        outcome, block = self.at.outcome, self.at.block
        if not asked:
            unasked = self.at.unasked(round_, result, self.lookahead.length)
            if unasked is None:
                return
            outcome, block = word(unasked, self._pace.speculates), unasked
            self.tally.opened(outcome)
        elif self.state is not State.VERIFYING:
            return  # it said that it has no room: it is asked again, and says the same again
        try:
            check_result(result, self.request, self.lookahead.length, block.tokens, self.at.prompt_entries)
        except ProtocolFault as broken:
            return self._leave_target(ev.Misled(self.target, str(broken)))
        if result.num_verified:
            self._pace.learn(SOURCES[outcome], block, result)
        self.moving.decided()
        self.tally.decided(result)
        news: list[Command] = [ev.Observe(outcome, result.num_verified, result.num_accepted, len(result.tokens))]
        if result.tokens or result.prompt_logprobs:
            news.insert(0, ev.Deliver(result.tokens, result.logprobs, origins(result), result.prompt_logprobs))
        if result.finish is not None:
            self._tell(StopTimer(Timer.STEP), *news)
            return self._finish(result.finish, result.stop_token_id)
        self._commit(result, asked)
        self._tell(*news)

    def _commit(self, result: Result, asked: bool) -> None:
        """Extends the committed tokens and goes on behind them, unless the next Step is out already."""
        before, before_hash = self.lookahead.length, self.lookahead.hash
        self.committed += result.tokens
        self._sources.commit(result.tokens, result.forced)
        self.at.decided(result, len(self.committed), asked)
        if self.at.open:
            return self._tell(*self.drafting.committed(before, before_hash, result.tokens, self.lookahead))
        self._tell(STOP_STEP, *self.drafting.committed(before, before_hash, result.tokens, self.lookahead))
        if self.state is State.CHOOSING:
            self._tell(StopTimer(Timer.GRACE))
        if self.state is not State.BACKING_OFF:
            self._go_on()

    def _go_on(self) -> None:
        """The target has something to go on with, or a round opens."""
        waiting, speculates = self.at.going.waiting(), self._pace.speculates
        if waiting is None and (self._reader_behind or not self.at.going.runs or self._waits()):
            return self._next_round()
        self.state, self.at.block = State.GOING, waiting or EMPTY
        self._tell(START_SILENT)
        if waiting is None and speculates and (choice := self._sources.choose()):
            self._offer(choice[0])  # it may find the plain row waiting; else it is for the one behind that
        if not self.at.block.own:
            self.lookahead.assume(self.at.block.tokens)
        self._tell(*self.drafting.sent(self.lookahead, self.at.block))
        self._tell_ahead(self.lookahead.block(2 * self._pace.most + 1))

    # --- time and the client -------------------------------------------------------------------------------------------

    def _on_timer(self, timer: Timer) -> None:
        state = self.state
        if timer is Timer.GRACE and state is State.CHOOSING:
            self.drafting.stayed_silent()
            self._tell(Count("grace_expired"))
            self._open_round(EMPTY, "miss")
        elif timer is Timer.RETRY and state is State.BACKING_OFF:
            self.moving.retry()
            self._ask_again()
        elif timer is Timer.STEP and state is State.GOING:
            self._next_round()
        elif timer is Timer.RETRY and state is State.PLACING:
            self._tell(*self.moving.ask())
        elif timer is Timer.STEP and state is State.VERIFYING:
            self._leave_target(ev.Overdue(self.target))
        elif timer is Timer.PLACEMENT and state is State.PLACING:
            self._fail(self.moving.nobody(self.decided))
        elif timer is Timer.DRAFT:
            self._tell(*self.drafting.want())

    def _leave_target(self, *why: Command) -> None:
        """The target is there and of no use: it may keep nothing of the session."""
        self._tell(*why, ToTarget(self.target, self.at.close()))
        self._on_target_lost()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, reason: FinishReason, stop_token_id: int | None) -> None:
        self._tell(ev.Finish(reason, stop_token_id, self.tally.stats()))
        self._end()

    def _fail(self, error: SpecdecError) -> None:
        self._tell(ev.Fail(error))
        self._end()

    def _end(self) -> None:
        if self.target:
            self._tell(ToTarget(self.target, self.at.close()))
        self._tell(*self.drafting.close())
        self.state = State.DONE
        self._tell(ev.Forget())
