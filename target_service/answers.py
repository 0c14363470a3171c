"""What is to be told, to which stream, in order."""

from __future__ import annotations

from specdec.terms import Answer, Outcome, Step
from target_service.sessions import Session


class Answers:
    def __init__(self) -> None:
        self._answers: list[tuple[int, Answer]] = []

    def take(self) -> list[tuple[int, Answer]]:
        """(stream, answer) since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def add(self, stream: int, *answers: Answer) -> None:
        self._answers += [(stream, answer) for answer in answers]

    def say(self, stream: int, step: Step, outcome: Outcome) -> None:
        """To who asked."""
        self.add(stream, Answer(step.session_id, step.epoch, step.round, outcome))

    def tell(self, session: Session, round_: int, outcome: Outcome, queue_us: int = 0) -> None:
        """To whoever speaks for the session now, if anyone."""
        if session.stream is not None:
            self.add(session.stream, Answer(session.key[1], session.epoch, round_, outcome, queue_us))
