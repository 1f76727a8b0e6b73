"""Describe quantized products and quantized rows as linear maps. Only rounding is ignored."""
