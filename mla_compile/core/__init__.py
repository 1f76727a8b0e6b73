"""Leaf records and figures that every room may read: they import nothing of ours but the errors."""
