"""Decode attention on Hopper (sm_90), in Gluon."""
