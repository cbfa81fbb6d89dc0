"""The Celery task with a lock."""
