"""What the templates of the admin need."""
