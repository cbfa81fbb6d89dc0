"""Optional apps, each of which needs an extra package."""
