"""The rows from which keys and values are made, and the records of a decision about them."""
