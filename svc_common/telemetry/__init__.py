"""What the services tell about themselves: metrics, traces and logs, over OTLP and to Prometheus."""
