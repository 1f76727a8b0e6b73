"""Prove that attention over rows gives the same result as attention over K and V: the obligations of a plan."""
