"""What happens to a generation, and what it wants done about it. Frozen; no behaviour, no I/O.

Events go in through `Generation.handle`, commands come out; only the driver turns commands into messages, timers and results.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from orchestrator.output import GenerationStats
from specdec.errors import SpecdecError
from specdec.terms import (
    Answer,
    DraftCommand,
    DraftEvent,
    DraftMethod,
    FinishReason,
    Origin,
    RejectionMethod,
    SamplingParams,
    TokenLogprobs,
    VerifyItem,
)
from specdec.terms.record import record


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that was validated and let in. Everything is complete: nothing is filled in behind this point.

    `tokens` = prompt, then output already delivered elsewhere (a resumed request); `prompt_length` separates the two.
    `num_speculative_tokens` = block length wanted, 0 = no draft session at all. `max_block` = most proposals a target takes in one Step.
    `window` = longest sequence of the target. `fork_session_id` = answer 0 of the same request, whose prompt is computed first; empty
    for answer 0 itself. `adaptive`: num_speculative_tokens is a maximum, the length of each block is chosen. `vocab_size` and `eos_ids` are
    the model's: what a target says is held to them; `eos_ids` None = not known.
    """

    session_id: str
    tokens: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    seed: int
    window: int
    num_speculative_tokens: int
    max_block: int
    rejection_method: RejectionMethod = RejectionMethod.COUPLED
    draft_method: DraftMethod = DraftMethod.GUMBEL
    traceparent: str = ""
    priority: int = 0
    fork_session_id: str = ""
    adaptive: bool = False
    vocab_size: int = 1 << 32
    eos_ids: tuple[int, ...] | None = None


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefixReady:
    """Answer 0 has decided something, ended or failed: the others of its request may start. `target` holds the prompt, empty = none."""

    target: str


@dataclass(frozen=True, slots=True)
class TargetPlaced:
    """A target takes the session. Answers PlaceTarget, or SeekRoom where another has room."""

    target: str


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The target that held the session is gone or hung; `alive`: or holds it still, and the session is to go on elsewhere before it ends;
    `reason` is then a word for a metric."""

    reason: str
    alive: bool = False


@record(frozen=True, slots=True)
class Answered:
    """The target answered an item."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class DraftPlaced:
    """A draft takes the session. Answers PlaceDraft. `max_block` = longest block it can be told of."""

    draft: str
    max_block: int


@dataclass(frozen=True, slots=True)
class DraftLost:
    """The draft that held the session is gone; `alive`: or of no use, and holds it still."""

    reason: str
    alive: bool = False


@record(frozen=True, slots=True)
class Drafted:
    """The draft said something about the session."""

    event: DraftEvent


class Timer(enum.Enum):
    __hash__ = object.__hash__  # a key in every round; that of enum.Enum is Python
    GRACE = "grace"  # waiting for a proposal
    RETRY = "retry"  # the target had no room
    STEP = "step"  # an answer is overdue
    PLACEMENT = "placement"  # no target yet
    DRAFT = "draft"  # ask for a draft again


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: Timer


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client is gone, or has all it wants (a stop string was completed)."""


@dataclass(frozen=True, slots=True)
class ReaderBehind:
    """The client reads slower than the target decides: start no further round."""


@dataclass(frozen=True, slots=True)
class ReaderCaughtUp:
    """Go on."""


Event = (
    PrefixReady
    | TargetPlaced
    | TargetLost
    | Answered
    | DraftPlaced
    | DraftLost
    | Drafted
    | TimerFired
    | Cancelled
    | ReaderBehind
    | ReaderCaughtUp
)


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlaceTarget:
    """Find a target: `prefer` if it is there, and not `avoid` unless it is the last."""

    avoid: str = ""
    prefer: str = ""


@dataclass(frozen=True, slots=True)
class SeekRoom:
    """The target has no room. Is there another than `full` that has? TargetPlaced answers if so, nothing if not."""

    full: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlaceDraft:
    """Find a draft, other than `avoid` if there is one."""

    avoid: str = ""


@record(frozen=True, slots=True)
class ToTarget:
    target: str
    item: VerifyItem


@record(frozen=True, slots=True)
class ToDraft:
    draft: str
    command: DraftCommand


@record(frozen=True, slots=True)
class StartTimer:
    """Replaces a running timer of the same name."""

    timer: Timer
    after_ms: float


@record(frozen=True, slots=True)
class StopTimer:
    timer: Timer


@record(frozen=True, slots=True)
class Deliver:
    """Newly decided tokens for the client, none when only `prompt_logprobs` (once in an answer, if asked for) are told."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    origins: tuple[Origin, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_token_id: int | None
    stats: GenerationStats


@dataclass(frozen=True, slots=True)
class Fail:
    error: SpecdecError


@record(frozen=True, slots=True)
class Observe:
    """One finished round, for the metrics. `outcome` is one of the words in tally.py."""

    outcome: str
    num_verified: int
    num_accepted: int
    num_decided: int


@record(frozen=True, slots=True)
class Count:
    """Something an operator wants counted: `what` is one of stale, replaced, draft_lost, resync, grace_expired."""

    what: str
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Overdue:
    """A target kept its answer for longer than it had."""

    target: str


@dataclass(frozen=True, slots=True)
class Misled:
    """A target said what cannot be."""

    target: str
    what: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The last command of a generation: drop routes and timers."""


Command = (
    PlaceTarget
    | SeekRoom
    | PlaceDraft
    | ToTarget
    | ToDraft
    | StartTimer
    | StopTimer
    | Deliver
    | Finish
    | Fail
    | Observe
    | Count
    | Overdue
    | Misled
    | Forget
)
