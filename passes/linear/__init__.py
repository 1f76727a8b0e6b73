"""Which tensors are fixed linear images of which rows: records, transfer rules, the analysis."""
