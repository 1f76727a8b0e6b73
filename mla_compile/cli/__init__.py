"""The commands of ``mla-compile``, which only parse arguments and print."""
