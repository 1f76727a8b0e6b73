"""Rewrites of a graph that other rooms have decided on."""
