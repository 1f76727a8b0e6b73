"""The commands of ``mla-compile``: they parse and print; the work is done elsewhere."""
