"""Changes to a graph that were decided elsewhere."""
