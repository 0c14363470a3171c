"""The states of one generation. No behaviour."""

from __future__ import annotations

import enum


class State(enum.Enum):
    WAITING = "waiting"  # answer 0 of the same request computes the prompt; PrefixReady comes when it has, at the latest when it is over
    PLACING = "placing"  # no target holds the session; the last PlaceTarget is unanswered, or RETRY will send it
    CHOOSING = "choosing"  # a block was wanted and no source has one (sources.py): waiting, at most one grace, for the draft
    VERIFYING = "verifying"  # one Step is outstanding (at most one ever is)
    GOING = "going"  # no Step is: the target goes on by itself (going.py), and a Step follows when it falls silent
    BACKING_OFF = "backing_off"  # the target had no room; the same Step goes out again when RETRY fires
    HELD = "held"  # the client reads too slowly; the next round starts when it has caught up
    DONE = "done"  # Finish, Fail or a cancel was told; every further event is ignored
