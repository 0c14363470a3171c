"""What the event loop asks of the engine thread, and what comes back. Plain data, handed over whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.sampling import Constraint
from specdec.terms import Begin, DraftDistribution, FinishReason, Grammar, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Score:
    """Decide after the row's last committed token. `committed` is not changed by anyone while the step runs; `constraint` is the state of
    the session's grammar and is touched on the engine thread only."""

    begin: Begin
    committed: Sequence[int]
    block: tuple[int, ...]
    distributions: tuple[DraftDistribution | None, ...]
    room: int  # tokens the window still takes after `committed`, at least 1
    constraint: Constraint | None = None

    @property
    def output(self) -> Sequence[int]:
        return self.committed[self.begin.prompt_length :]


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Log-probabilities of prompt tokens: the logits at position `first` + i are those of `tokens[i]`, which stands one further on and may
    lie behind the row; `count` alternatives each."""

    first: int
    tokens: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Row:
    """One session's part of an engine step: cut its KV back to `start`, then feed `tokens` (committed ones, then the block).

    `resident` names the KV; one that was never named before begins empty. Without `score` this is a piece of a prefill.
    """

    resident: int
    start: int
    tokens: tuple[int, ...]
    score: Score | None = None
    prompt: PromptScore | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def logits_from(self) -> int:
        """Offset in `tokens` of the first row whose logits are needed; len(tokens) = none. Those behind it get theirs too."""
        decided = len(self.tokens) - (0 if self.score is None else 1 + len(self.score.block))
        return decided if self.prompt is None else min(decided, self.prompt.first - self.start)


@dataclass(frozen=True, slots=True)
class Fork:
    """`resident` begins with the first `length` tokens of what `donor` holds."""

    resident: int
    donor: int
    length: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The resident's KV goes away, if it ever had any."""

    resident: int


@dataclass(frozen=True, slots=True)
class Keep:
    """The resident's session ended. It keeps its first `length` tokens, for others to begin with, and nothing else."""

    resident: int
    length: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`changes` come before the rows, in the order in which room was booked and released for them: so there is a donor for every fork, and
    room, although the donor may be dropped in the same step."""

    rows: tuple[Row, ...]
    changes: tuple[Fork | Drop | Keep, ...] = ()

    @property
    def size(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The row's tokens are in KV; with the log-probabilities that `Row.prompt` asked for."""

    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Decided:
    """What the target decided, and the KV's length after rollback."""

    tokens: tuple[int, ...]
    num_verified: int
    num_accepted: int
    kv_length: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    forced: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFault:
    """This session cannot go on; its neighbours can. `code` = gRPC status code number."""

    code: int
    message: str


RowOutcome = Prefilled | Decided | RowFault


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`rows` in the plan's order. `sample_us` = the part of `engine_us` behind the forward: tokens chosen, keys and values rolled back."""

    rows: tuple[RowOutcome, ...]
    engine_us: int = 0
    sample_us: int = 0


@dataclass(frozen=True, slots=True)
class Compile:
    """Make a grammar ready, beside the engine's steps, and read `output` in it. `key` and `epoch` name the session that waits for it."""

    key: tuple[str, str]
    epoch: int
    grammar: Grammar
    output: tuple[int, ...] = ()
    traceparent: str = ""


def kv_length_after(committed: int, num_accepted: int, num_tokens: int) -> int:
    """Leading committed tokens in KV once the refused proposals are cut off. The newest committed token never is: its row has to be
    fed again anyway to get the logits after it."""
    return min(committed + num_accepted, committed + num_tokens - 1)
