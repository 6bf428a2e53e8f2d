"""Weights, GPU KV cache, linear operations, prefill and GPU decode attention, swapping, sampling."""
