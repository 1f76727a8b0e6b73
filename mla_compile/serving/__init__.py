"""An OpenAI-compatible server of one model: the handlers of ``transformers serve``, over pages of latent rows.

``settings``: the settings. ``ranks``: the processes that serve one model together. ``loaded``: loading and compiling
the model. ``bodies``: the requests that clients may send. ``reading``: the handlers of transformers, which read text in
a thread. ``generation``: from a request's token ids to its answer. ``door``: the first checks of every request.
``app``: the routes. ``exposition``: the figures for Prometheus. ``trial``: the server's own first requests. ``server``:
startup and shutdown.
"""
