"""Decode attention on CPU."""
