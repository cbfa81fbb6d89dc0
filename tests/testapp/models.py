"""Models of the tests' tasks. Their tables are made without migrations."""

from __future__ import annotations

from django.db import models


class Account(models.Model):
    """Data that only the newest holder of a lock may write."""

    balance = models.IntegerField(default=0)
    fence = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.balance}, written by {self.fence}"
