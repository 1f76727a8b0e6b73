"""Finds, for each operator, on which positions of the operands each position of the result depends."""
