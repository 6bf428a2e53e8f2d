"""The front door and the only one that decides: requests, queues, block allocators, scheduler, estimator."""
