"""What only a GPU can run."""
