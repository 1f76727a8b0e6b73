"""Capture and emission: a user's object becomes a ``Program``, and a ``Program`` an object of the same kind."""
