"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

# == Stores and the epoch

# == Locks, leases, renewal

# == Tasks, messages, headers

# == Options, settings, checks, keys

# == The history

# == Operators: held now, names, words, the command, the admin

# == Workers
