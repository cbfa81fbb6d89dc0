"""The lock, its lease, and the thread that renews it."""
