"""The draft service: a small model that proposes tokens."""
