"""Who may call a service and how it proves itself: TLS from files, API keys, sockets' modes, and what is left open."""
