"""Attention operators of libraries, told as plain attention by what their schemas and documentation say of them."""
