"""Compare rewritten attentions with the untouched graph, in float64 and in the model's precision."""
