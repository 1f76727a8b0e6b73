"""The code that runs around compiled graphs in each call: the choice of a form, folded weights, caches of rows."""
