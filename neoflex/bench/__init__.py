"""A load client: sends a workload to a server over gRPC or HTTP and says how it was served."""
