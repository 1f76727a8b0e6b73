"""Nodes of the graph, axes as products of atoms, and weight expressions. Nothing here knows about attention."""
