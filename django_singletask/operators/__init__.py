"""What the admin and the command know of the locks and of their history."""
