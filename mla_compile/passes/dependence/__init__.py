"""On which positions of its operands each position of a result depends, operator by operator."""
