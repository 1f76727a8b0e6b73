"""Linear maps from the rows of a source to a tensor: records, transfer rules and the analysis."""
