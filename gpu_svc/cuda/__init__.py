"""What device cuda has beside torch's operations: pinned memory, copies on streams, doorbells by the stream, graphs."""
