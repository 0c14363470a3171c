"""Measuring: one engine step, agreement with float32, load."""
