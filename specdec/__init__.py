"""The shared library: what draft, target, orchestrator and their users have in common."""
