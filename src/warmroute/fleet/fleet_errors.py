"""Errors of the fleet's methods."""


class UnknownNode(KeyError):
    """No node has this name."""


class NameTaken(ValueError):
    """Another node has this name."""
