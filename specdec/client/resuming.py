"""How far the answers of one request have come, and which request goes on with them elsewhere. Pure: knows no connection.

An answer goes on exactly from the ids that were told and its seed: ids, text, log-probabilities, limits, grammar and stop strings are
those of an answer that was never interrupted. Its text goes on by itself: the service holds back what may still change, and holds it back
again when it is given the ids. What it lets go of because the answer breaks off there is therefore not told while the answer may go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.client.answers import Delta, Event, Finished, Started
from specdec.client.legs import Leg, summed
from specdec.client.requests import Options
from specdec.seeds import answer_seed
from specdec.terms import SamplingParams


class _Answer:
    def __init__(self, index: int, resumed: Sequence[int]) -> None:
        self.index, self.ids = index, list(resumed)
        self.started = self.finished = self.prompt_told = False
        self.let_go: Delta | None = None  # text without tokens, which breaking off may have let go of
        self.legs: list[Leg] = []  # that broke off, and the one that runs

    def take(self, event: Event) -> list[Event]:
        event = replace(event, index=self.index)
        if isinstance(event, Started):
            self.let_go = None  # it goes on: the text is held back again
            self.legs.append(Leg())
            news, self.started = [] if self.started else [event], True
            return list(news)
        held = [] if self.let_go is None else [self.let_go]
        self.let_go = None
        if isinstance(event, Finished):
            self.finished = True
            event = summed(event, self.legs[:-1])
        elif event.token_ids or event.prompt_logprobs:
            self.ids += event.token_ids
            self.legs[-1].take(event.origins)
            self.prompt_told |= bool(event.prompt_logprobs)
        else:
            self.let_go = event
            return [*held]
        return [*held, event]


class Resuming:
    """`next` gives the request to send, `take` hears what comes of it; again until `over`."""

    def __init__(self, sampling: SamplingParams | None, options: Options) -> None:
        self._sampling, self._options = sampling, options
        self._seed = options.get("seed")
        self._answers = [_Answer(i, options.get("output_token_ids") or ()) for i in range(options.get("n") or 1)]
        self._asked: _Answer | None = None  # for one answer alone
        self.first: Started | None = None  # what the first of them began with
        self.events = 0  # told so far

    @property
    def over(self) -> bool:
        return all(answer.finished for answer in self._answers)

    @property
    def output_tokens(self) -> int:
        """Of the answer that is on its way, resumed ones included."""
        return len((self._asked or self._answers[0]).ids)

    def next(self) -> tuple[SamplingParams | None, Options]:
        """All answers as they were asked for while nothing is told, then one after the other from where it is."""
        if self._seed is None or not any(answer.started for answer in self._answers):
            self._asked = None
            return self._sampling, self._options
        answer = self._asked = next(answer for answer in self._answers if not answer.finished)
        sampling = self._sampling
        if sampling is not None and (answer.prompt_told or answer.index):
            sampling = replace(sampling, prompt_logprobs=None)
        seed = answer_seed(self._seed, answer.index)
        options: Options = {**self._options, "seed": seed, "output_token_ids": tuple(answer.ids), "n": None, "request_id": None}
        return sampling, options

    def take(self, event: Event) -> list[Event]:
        """What is news of it, in order."""
        if isinstance(event, Started):
            self.first = self.first or event
            if event.index == 0 and self._seed is None:
                self._seed = event.seed
        news = (self._asked or self._answers[event.index]).take(event)
        self.events += len(news)
        return news

    def gives_up(self) -> list[Event]:
        """It does not go on: the last text there is."""
        return [answer.let_go for answer in self._answers if answer.let_go is not None]
