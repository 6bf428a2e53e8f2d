"""The OpenAI-compatible HTTP face of the server: a client of planner_svc in a process of its own."""
