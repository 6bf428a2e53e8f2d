"""NeoFlex: serves large language models on one GPU and the CPU beside it."""
