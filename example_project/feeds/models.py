from __future__ import annotations

from django.db import models


class Feed(models.Model):
    url = models.URLField(max_length=500, unique=True)
    title = models.CharField(max_length=500, blank=True)
    etag = models.CharField(max_length=500, blank=True, editable=False)
    last_modified = models.CharField(max_length=100, blank=True, editable=False)
    checked_at = models.DateTimeField(null=True, blank=True, editable=False)
    last_error = models.CharField(max_length=500, blank=True, editable=False)

    def __str__(self) -> str:
        return self.title or self.url


class Entry(models.Model):
    feed = models.ForeignKey(Feed, on_delete=models.CASCADE, related_name="entries")
    guid = models.CharField(max_length=500)
    title = models.CharField(max_length=500, blank=True)
    link = models.URLField(max_length=1000, blank=True)
    published = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name_plural = "entries"
        constraints = [
            models.UniqueConstraint(fields=["feed", "guid"], name="one_entry_per_feed_and_guid"),
        ]

    def __str__(self) -> str:
        return self.title or self.guid
