from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from example_project.feeds.models import Entry, Feed
from example_project.feeds.tasks import import_feed


@admin.register(Feed)
class FeedAdmin(admin.ModelAdmin):
    list_display = ["url", "title", "checked_at", "last_error"]
    readonly_fields = ["etag", "last_modified", "checked_at", "last_error"]
    search_fields = ["url", "title"]
    actions = ["import_now"]

    @admin.action(description="Import the selected feeds now")
    def import_now(self, request: HttpRequest, queryset: QuerySet[Feed]) -> None:
        for feed in queryset:
            import_feed.delay_on_commit(feed_url=feed.url)
        self.message_user(request, "Sent. A feed that is being imported right now is skipped.")


@admin.register(Entry)
class EntryAdmin(admin.ModelAdmin):
    list_display = ["title", "feed", "published"]
    list_select_related = ["feed"]
    list_filter = ["feed"]
    search_fields = ["title", "guid"]
