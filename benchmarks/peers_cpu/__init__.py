"""Whole models beside the programs that users would pick instead, on a CPU."""
