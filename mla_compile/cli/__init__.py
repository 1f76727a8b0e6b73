"""The commands of ``mla-compile``. They parse and print; the work is done elsewhere."""
