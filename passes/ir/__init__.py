"""The graph and its values: nodes, axes as products of atoms, expressions of weights. Knows no attention."""
