"""Loads or builds the model that a command line names, and inspects it."""
