"""When sessions leave a target that drains. Pure.

Rules
1. Moving costs a prefill elsewhere, and the client a pause of as long. A session that will have ended in time stays.
2. The others leave one after the other, evenly over the time that is left less MARGIN_MS, so that their prompts do not meet in one queue;
   those with the most to come go first. Who is still there when MARGIN_MS is left goes then.
3. While there is time a session goes only where it is sure to be the same text. At the end it goes anywhere: the alternative is to lose the
   target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

MARGIN_MS = 2000.0  # of the drain, for what is unforeseen: a full target elsewhere, a long prefill
BEAT_MS = 250.0  # targets say how much time is left at least this often


def leave(to_come: Mapping[str, int], step_ms: float, remaining_ms: float, *, equal: bool) -> list[str]:
    """Sessions that leave on this beat. `to_come` = the most tokens that each may still decide; `step_ms` = time of a round there;
    `equal`: another target of the same numerics takes sessions."""
    spare_ms = remaining_ms - MARGIN_MS
    if spare_ms <= 0:
        return list(to_come)
    if not equal:
        return []
    late = sorted((s for s, tokens in to_come.items() if tokens * step_ms > spare_ms / 2), key=lambda s: -to_come[s])
    return late[: math.ceil(len(late) * min(1.0, BEAT_MS / spare_ms))]
