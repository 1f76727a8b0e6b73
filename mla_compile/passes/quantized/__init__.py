"""Describes quantized products and quantized rows to the passes as the linear maps that they round."""
