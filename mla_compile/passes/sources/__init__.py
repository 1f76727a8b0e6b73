"""The rows from which keys and values are made, and the records of plans and verdicts."""
