"""Describes quantized products and quantized rows as the linear maps that they are up to rounding."""
