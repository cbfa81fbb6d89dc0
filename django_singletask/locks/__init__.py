"""The lock: its name and key, one acquisition of it, and the thread that renews it.

A name or the arguments of a call become a key (keys.py, parameters.py). A LockRef (ref.py) says
which lock in which cache, and which run wants it. A Lease (lease.py) is one acquisition of it.
Users see a lease as a TaskLock (lock.py), in asyncio code too (aio.py), or use only_one()
(only_one.py). A delivery of a task has a lease without a TaskLock. The thread of renewal.py keeps
the leases of the process, and liveness.py proves that the process of another holder is gone.

The life of a lease
-------------------

::

            take()                        leave()
    new ----------------> held -------------------------> left
     |                    |  ^  |                          ^
     |                    |  |  | settle(): gone or taken, |
     | blocker            |  |  | or the deadline passed   | leave()
     v                    +--+  v                          |
    not taken       settle()    lost ----------------------+

A new lease is tried in the store. It is *held* from the reply on, or another holder is its
``blocker``. A held lease is trusted until its ``deadline``, which each renewal moves. It is *lost*
if that has passed when somebody asks, or if a renewal finds the entry gone or taken. What is lost
stays lost, and is not set again, because another run may have had the lock since. It still counts
as ``held`` until it is left. Only an entry that the cache lost is *retaken*, if a renewal finds it
free before the deadline.

The trust window
----------------

A holder trusts its lease for a little less time than the server grants, and counts it from before
the request was sent, by the clock of its own process. The reply can arrive long after the server
granted the lease:

::

    here:    sent --------------------------- reply (late) ---- sent + length: no trust
    server:        granted ------------------------------------------- ends: free

A body that sleeps for longer than that, such as a stopped process, can wake beside the next holder:
no lease can prevent that. Then the lease is lost, and ``check()`` and the log say it.
"""
