"""What was done to a model and why not more, as records, as text, and as a page."""
