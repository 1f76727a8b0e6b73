"""Repeated parts of a graph, such as the layers of a model, which are compiled once and called for each repetition.

``find`` finds these parts, ``split`` makes a graph that calls them.
"""
