"""Formal languages for the output: which ids may follow. Our part is the state per row; llguidance knows the languages.

Rules
- A state is a function of the decided tokens alone. It moves to any row by rolling back to what the two outputs share and feeding the
  rest, so a block is explored row by row and what is refused leaves no trace; an end is never fed.
- Ends are ours: where a sentence is complete the ids that end the text become legal beside those that continue it (`may_end`);
  where nothing can follow, the text ends there (`must_end`).
- Where the language leaves no choice of text, the tokenizer's own way to write it is the only legal one, one id after the other:
  `forced` names them, and each is the whole mask of its row.
- With `start_after` the output is free up to that text; a token that would run past its end is not legal, so that everything behind it
  is of the language.
- Work is bounded per grammar, per row and per answer, counted and not timed. What is not bounded by counting is tried in a process of its
  own first (specdec/runtime/trial.py).

    compiler.py    a grammar's text to a state before the first token; what is refused, and how that is said
    forms.py       the four forms in the library's notation
    schema.py      keywords of a JSON schema that nobody would obey
    words.py       the vocabulary as the library asks for it
    marker.py      the text that a grammar begins after
    constraint.py  the state of one session
"""

from specdec.grammar.compiler import MAX_COMPILED, GrammarCompiler
from specdec.grammar.constraint import MAX_FORCED, Allowed, Constraint, DeadEnd, Mask, NoBeginning

__all__ = ["MAX_COMPILED", "MAX_FORCED", "Allowed", "Constraint", "DeadEnd", "GrammarCompiler", "Mask", "NoBeginning"]
