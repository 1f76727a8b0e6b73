"""Finds which positions of its operands each position of a result depends on, operator by operator."""
