"""What runs in the main process of a worker."""
