"""Where the attentions of a graph are, and what is between their products."""
