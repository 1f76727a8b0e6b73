"""Repeated parts of a graph, the layers of a model, which are compiled once and called for each.

``find`` says where they are, ``split`` makes the graph of calls.
"""
