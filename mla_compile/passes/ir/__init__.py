"""The graph and its values: nodes, axes as products of atoms, weight expressions. It knows nothing of attention."""
