"""The decision about each attention: proof obligations, costs, the verdict and its reason."""
