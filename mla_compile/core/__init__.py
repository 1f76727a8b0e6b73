"""Basic records and helpers for every package. This package itself imports only errors, codes and version."""
