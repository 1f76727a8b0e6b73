"""Finding the attentions of a graph, and describing what lies between their products."""
