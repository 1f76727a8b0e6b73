"""Decode attention in Triton: what is launched, and how."""
