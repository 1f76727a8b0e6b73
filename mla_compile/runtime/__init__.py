"""Code that runs around compiled graphs in each call: it chooses a form, folds weights, and keeps caches as rows."""
