"""Rewrites that give every operator one spelling before any analysis."""
