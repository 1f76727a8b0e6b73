"""Rewrites of a graph, which other passes have decided on."""
