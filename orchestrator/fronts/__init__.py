"""Doors of the orchestrator: each speaks one protocol and hands the core the same `Request`."""
