"""How much speculation pays: learned from finished rounds, asked before each one. Pure: numbers and times come in, numbers go out.

survival.py   the chance that a proposed token stands
step_time.py  what a target's step takes, by its rows
choice.py     the slots that are worth their rows
regime.py     what a round takes at one load, with and without speculation
machine.py    one target: whether its sessions speculate now, and when to try the other way
seat.py       one session at its target, by the clock
adaptive.py   one session's pace
desk.py       all of them
"""

from orchestrator.control.desk import Desk

__all__ = ["Desk"]
