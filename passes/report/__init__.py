"""Verdicts as the records that reports are made of."""
