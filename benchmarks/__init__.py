"""Benchmarks. A package, so that benchmarks/gpu can import benchmarks/common.py by one name from anywhere."""
