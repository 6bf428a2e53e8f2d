"""Functions that Triton compiles for the device; Python never runs them, but for its interpreter in tests."""
