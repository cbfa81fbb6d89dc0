"""The history of the locks, in the database."""
