"""Describe quantized products and quantized rows as linear maps, which they are up to rounding."""
