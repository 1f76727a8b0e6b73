"""Basic records and helpers that every package may import; of ours they import only errors, codes and the version."""
