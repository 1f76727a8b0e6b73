"""Checks and benchmarks that need a CUDA device; see README.md."""
