"""The target service: the model whose text is delivered."""
