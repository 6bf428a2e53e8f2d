"""Host KV pool and decode attention on the CPU."""
