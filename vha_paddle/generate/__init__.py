"""Text from a model, token by token, by a decoder that remembers what it has read."""
