"""What runs in every call of a compiled model, around its graphs: the choice of a form, caches, recompilation."""
