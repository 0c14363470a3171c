"""The orchestrator: sessions, lookahead, placement and the fronts. No torch in its process."""
