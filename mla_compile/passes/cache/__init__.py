"""Caches of K and V per head, kept as latent rows."""
