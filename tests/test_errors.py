from __future__ import annotations

import pytest

from django_singletask.operators.errors import without_secrets


@pytest.mark.parametrize(
    "cache",
    [
        {"LOCATION": "redis://:s3cret@127.0.0.1:1/0"},
        {"LOCATION": "redis://user:s3%63ret@127.0.0.1:1/0"},
        {"LOCATION": ["redis://user:s3cret@127.0.0.1:1/0"]},
        {"OPTIONS": {"PASSWORD": "s3cret"}},
        {"OPTIONS": {"pool": {"password": "s3cret"}}},
    ],
)
def test_passwords_are_struck_out(settings, cache):
    settings.CACHES = {"default": {"BACKEND": "x", **cache}}
    assert without_secrets("cannot use s3cret for x") == "cannot use *** for x"


def test_a_password_that_contains_another_is_struck_out_whole(settings):
    settings.CACHES = {"default": {"OPTIONS": {"PASSWORD": "s3cret", "password": "s3cret2"}}}
    assert without_secrets("s3cret2") == "***"
