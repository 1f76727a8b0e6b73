"""An OpenAI-compatible server of one model: the handlers of ``transformers serve``, over pages of latent rows.

``settings``: what can be asked of it. ``loaded``: the model, from nothing to ready. ``bodies``: requests as clients may
send them. ``reading``: transformers' handlers, which read text in a thread of their own. ``generation``: from tokens to
answers, each request by itself. ``door``: what every request passes first. ``app``: the routes. ``exposition``: what
Prometheus reads. ``trial``: the first requests, which are the server's own. ``server``: listening, and ending.
"""
