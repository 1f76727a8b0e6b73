"""The way into a graph and out of it: a model or a program becomes a ``Program``, and one of its own kind again."""
