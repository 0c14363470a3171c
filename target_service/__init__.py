"""The target service: scores blocks of proposed tokens with the large model and decides."""
