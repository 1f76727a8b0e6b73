"""Whether an attention over rows computes the same: the obligations of a plan, and what is proved."""
