"""Quantized products and quantized rows, told to the passes as the linear maps that they round."""
