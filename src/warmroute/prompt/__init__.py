"""From the bytes of a request to its model and the tokens of its prompt."""
