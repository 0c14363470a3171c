"""Formal languages for the output: which ids may follow. Our part is the state per row; llguidance knows the languages.

Rules
- A state is a function of the decided tokens alone. A target asks row by row along what it decides, so nothing is read that is refused
  later, and the state reads each text in one way: where it outgrows the limits, too, hangs on no block. A draft roams: its state moves
  to any row by rolling back to what the two outputs share and feeding the rest. An end is never fed.
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
    reading.py     a place in a text: one matcher of the library
    constraint.py  the state of one session
    roamer.py      the same for outputs in any order
"""

from specdec.grammar.compiler import MAX_COMPILED, GrammarCompiler
from specdec.grammar.constraint import MAX_FORCED, Constraint
from specdec.grammar.reading import Allowed, DeadEnd, Mask, NoBeginning
from specdec.grammar.roamer import Roamer

__all__ = ["MAX_COMPILED", "MAX_FORCED", "Allowed", "Constraint", "DeadEnd", "GrammarCompiler", "Mask", "NoBeginning", "Roamer"]
