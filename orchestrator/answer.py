"""One answer as the client sees it: decided tokens in; ids, text and counts out. Pure; knows no wire, no loop.

Rules
1. The id that ends an answer (end of sequence, a stop id) is never delivered; the target does not even report it as a token.
2. The token that completes a stop string is delivered as an id, with the text in front of the stop string (or through it, when asked
   for). Tokens decided behind it are discarded: not delivered, not billed.
3. A stop string counts from the token on that brings the answer to `min_tokens`; completed earlier it is ordinary text.
4. Text may lag behind ids, while a character or a stop string is incomplete. What was held back in vain leaves with the last delta.
5. Text that the decoder holds because later ids may change it is looked at as it is: a stop string in it ends the answer at the token
   that completes it, as if the text were decoded anew after each token.
6. Resumed ids pass through decoder and stop matcher like the others, and their text counts as delivered. Since text is a function of
   the ids alone, it goes on exactly where the first stream stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.detokenise import Hidden, IncrementalDecoder, visible
from orchestrator.output import Ended, GenerationStats, TokensDecided
from orchestrator.stops import StopMatcher
from specdec.terms import FinishReason, Origin, TokenLogprobs
from specdec.terms.record import record


@record(frozen=True, slots=True)
class Delta:
    """New ids with their log-probabilities (one each, or none) and origins, and the text that is final now. `prompt_logprobs`: in the
    first delta of an answer that was asked for them."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    origins: tuple[Origin, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """`completion_tokens` = delivered, resumed ones included; `accepted` of those delivered here were proposals; `rejected` proposals
    were verified and not kept; `discarded` tokens were decided behind a stop."""

    prompt_tokens: int
    completion_tokens: int
    accepted: int
    rejected: int
    discarded: int


@dataclass(frozen=True, slots=True)
class Finished:
    """`stop_reason` = the stop string, or the stop id in decimal, that ended the answer; empty when it ended by length."""

    reason: FinishReason
    stop_reason: str
    usage: Usage
    stats: GenerationStats


class AnswerStream:
    """Feed it with `tokens` until one of its deltas completes a stop string (`stopped`) or the generation ends, then take `finish`."""

    def __init__(
        self, decoder: IncrementalDecoder, matcher: StopMatcher, *, prompt_tokens: int, resumed: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        self._decoder, self._matcher = decoder, matcher
        self._prompt_tokens, self._min_tokens = prompt_tokens, min_tokens
        self.stopped: str | None = None  # the stop string that was completed
        self.delivered = 0  # tokens handed on here, resumed ones not included
        self._resumed = self._accepted = self._discarded = 0
        self._judged = ""  # text that the decoder holds and that was searched for stop strings
        for token_id in resumed:
            if self.stopped is None:
                self._resumed += 1
                self._see(token_id)

    def tokens(self, event: TokensDecided) -> Delta:
        """What of these tokens goes to the client. May set `stopped`; then nothing more may be fed."""
        text, kept = "", 0
        for token_id in event.tokens:
            kept += 1
            self.delivered += 1
            text += self._see(token_id)
            if self.stopped is not None:
                break
        self._discarded += len(event.tokens) - kept
        origins = event.origins[:kept]
        self._accepted += origins.count(Origin.ACCEPTED)
        return Delta(event.tokens[:kept], text, event.logprobs[:kept], origins, event.prompt_logprobs)

    def finish(self, end: Ended | GenerationStats) -> tuple[Delta, Finished]:
        """The last text and the last message. `end`: how the generation ended, or its counts when a stop string ended the answer."""
        text = self.flush()
        if isinstance(end, GenerationStats):
            reason, why, stats = FinishReason.STOP, self.stopped or "", end
        else:
            reason, stats = end.finish, end.stats
            why = "" if end.stop_token_id is None else str(end.stop_token_id)
            if self.stopped is not None:  # completed by text that only the end released
                reason, why = FinishReason.STOP, self.stopped
        return Delta(text=text), Finished(reason, why, self._usage(stats), stats)

    def flush(self) -> str:
        """Text that was held back in vain: the answer ended, or broke off."""
        if self.stopped is not None:
            return ""
        text = self._match(self._decoder.flush(), ())
        return text if self.stopped is not None else text + self._matcher.flush()

    def _see(self, token_id: int) -> str:
        pieces = self._decoder.step(token_id)
        return self._match(pieces, self._decoder.pending()) if self._matcher.any else visible(pieces)

    def _match(self, final: Sequence[str], pending: Sequence[str]) -> str:
        """Text that may leave. What was searched while it was pending is not searched again: a stop string that did not count then
        (`min_tokens`) is text."""
        if not final and "".join(pending) == self._judged:
            return ""
        judged = _shared(self._judged, "".join((*final, *pending))) if self._judged else 0
        text, judged = self._feed(self._matcher, final, judged)
        if pending and self.stopped is None:
            ahead, _ = self._feed(self._matcher.fork(), pending, judged)
            if self.stopped is not None:
                text += ahead
        self._judged = "".join(pending)
        return text

    def _feed(self, matcher: StopMatcher, pieces: Sequence[str], judged: int) -> tuple[str, int]:
        """(text released, judged characters that are still to come)."""
        armed = self._resumed + self.delivered >= self._min_tokens
        released = ""
        for piece in pieces:
            for part, counts in ((piece[:judged], False), (piece[judged:], armed)):
                if part:
                    text, self.stopped = matcher.push(part, hidden=isinstance(piece, Hidden), armed=counts)
                    released += text
                    if self.stopped is not None:
                        return released, 0
            judged = max(0, judged - len(piece))
        return released, judged

    def _usage(self, stats: GenerationStats) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._resumed + self.delivered,
            accepted=self._accepted,
            rejected=stats.drafted - stats.accepted,
            discarded=max(self._discarded, stats.decided - self.delivered),
        )


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
