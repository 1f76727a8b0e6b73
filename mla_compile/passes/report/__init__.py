"""Turn verdicts into the records that reports consist of."""
