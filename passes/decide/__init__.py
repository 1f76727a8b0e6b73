"""What becomes of each attention: the proof obligations, the costs, the verdict and its reason."""
