"""Traces of running iterations: recorded from a server, summed up, written for Perfetto, drawn."""
