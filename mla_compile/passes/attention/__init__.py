"""Find the attentions of a graph, and describe what lies between their products."""
