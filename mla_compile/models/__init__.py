"""Where a model named on the command line comes from, and what can be seen by looking at it."""
