"""Linear maps: which tensors are fixed linear images of which rows. Records, transfer rules and the analysis."""
