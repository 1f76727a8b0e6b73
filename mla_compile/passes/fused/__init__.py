"""Attention operators of libraries, expressed as plain attention according to their schemas and documentation."""
