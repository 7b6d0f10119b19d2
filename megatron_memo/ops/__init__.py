"""Operators whose kernels differ between CUDA and CPU, each behind one interface."""
