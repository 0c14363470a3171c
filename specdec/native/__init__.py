"""Compiled code of our own below the engine: how it is built (build.py), and the search of the noise (loud.py)."""
