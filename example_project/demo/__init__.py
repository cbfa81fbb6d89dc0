"""The modules of `manage.py demo`."""
