"""An OpenAI-compatible server of one model: the handlers of ``transformers serve``, over pages of latent rows.

``settings``: the settings. ``ranks``: the processes that serve one model together. ``loaded``: loading and compiling
the model. ``bodies``: the requests that clients may send. ``reading``: the handlers of transformers, which read text in
a thread. ``generation``: from token ids to answers, one request at a time. ``door``: the checks that every request
passes first. ``app``: the routes. ``exposition``: the figures that Prometheus reads. ``trial``: the server's own first
requests. ``server``: startup and shutdown.
"""
