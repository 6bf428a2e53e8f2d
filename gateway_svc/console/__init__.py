"""The page at `/`, and what it shows."""
