"""Why an attention is not absorbed: the node at which a proof ends, and the reason in words."""
