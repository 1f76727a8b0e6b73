"""Rewrites of a graph, applied where other passes decide."""
