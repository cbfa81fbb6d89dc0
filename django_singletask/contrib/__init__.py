"""What a project may add, each an app of its own with a package that it needs."""
