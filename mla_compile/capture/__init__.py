"""Capture and emission: a user's object becomes a ``Program``, which later becomes an object of the same kind."""
