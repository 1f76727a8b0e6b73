"""Continuous batching with the scheduler of transformers, over pages of latent rows.

``graphs``: a model as compiled functions. ``steps``: one step of the scheduler on these functions. ``pages``: the pool
of pages. ``manager``: the classes that plug graphs, steps and pages into transformers. ``door``:
:func:`mla_compile.continuous_batching`.
"""
