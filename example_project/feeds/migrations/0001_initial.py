from __future__ import annotations

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Feed",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("url", models.URLField(max_length=500, unique=True)),
                ("title", models.CharField(blank=True, max_length=500)),
                ("etag", models.CharField(blank=True, editable=False, max_length=500)),
                ("last_modified", models.CharField(blank=True, editable=False, max_length=100)),
                ("checked_at", models.DateTimeField(blank=True, editable=False, null=True)),
                ("last_error", models.CharField(blank=True, editable=False, max_length=500)),
            ],
        ),
        migrations.CreateModel(
            name="Entry",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("guid", models.CharField(max_length=500)),
                ("title", models.CharField(blank=True, max_length=500)),
                ("link", models.URLField(blank=True, max_length=1000)),
                ("published", models.DateTimeField(blank=True, null=True)),
                (
                    "feed",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="entries",
                        to="feeds.feed",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "entries",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("feed", "guid"), name="one_entry_per_feed_and_guid"
                    )
                ],
            },
        ),
    ]
