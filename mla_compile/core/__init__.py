"""Basic records and helpers for every package. Of our other modules, they import only errors, codes and the version."""
