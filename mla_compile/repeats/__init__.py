"""Compile a repeated part of a graph, such as a layer, only once, and call it for each repetition.

``find`` finds these parts, ``split`` makes a graph that calls them.
"""
