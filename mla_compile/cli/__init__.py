"""The commands of ``mla-compile``. They only parse arguments and print."""
