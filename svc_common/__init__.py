"""What the services share: configuration, model specs, gRPC set-up and the tensor plane."""
