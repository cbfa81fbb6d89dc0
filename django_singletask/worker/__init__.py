"""What runs in the main process of a worker.

It refuses to start if the locks would not work, and chooses the token of each message's lock, so
that it knows the token of each run (startup.py). A process of the pool that dies leaves its lock
behind. The main process sees that the process is gone, and frees the lock with that token, and no
other (watcher.py). The main process of one worker after the other sweeps the history (sweeper.py).
"""
