"""Models of the tests' tasks. Their tables are made without migrations."""
