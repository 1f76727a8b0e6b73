"""Continuous batching with the scheduler of transformers, over pages of latent rows.

``graphs``: a model as two compiled functions. ``steps``: one step of the scheduler, through these. ``pages``: the pool.
``manager``: what plugs them into transformers. ``door``: :func:`mla_compile.continuous_batching`.
"""
