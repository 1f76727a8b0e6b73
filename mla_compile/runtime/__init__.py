"""What runs in each call around the compiled graphs: the choice of a form, folded weights, caches of latent rows."""
