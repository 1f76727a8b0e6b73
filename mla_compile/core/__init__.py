"""Basic records and helpers that every package may import; they import nothing of ours but the errors."""
