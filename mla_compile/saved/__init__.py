"""Compiled code in a folder: :func:`mla_compile.save` and :func:`mla_compile.load`."""
