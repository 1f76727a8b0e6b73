"""Where a model named on the command line comes from, and what is seen by looking at it."""
