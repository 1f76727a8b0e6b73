"""Basic records and helpers for every package. Outside this package, they import only errors, codes and version."""
