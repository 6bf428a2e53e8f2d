"""Discrete events around the scheduler that serves: what a machine would do with a workload. No clock, no sleep."""
