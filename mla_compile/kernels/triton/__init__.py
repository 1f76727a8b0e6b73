"""Decode attention in Triton: the kernels and their launches."""
