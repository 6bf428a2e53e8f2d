"""What `benchmarks/gpu_check.sh` runs: proves and measures the executor on the machine's GPU, or small on its CPU."""
