"""Triton kernels, and the tables and tile shapes that they use."""
