"""The Celery task with a lock: what its messages carry, and how they meet their own earlier runs.

The producer makes the key of the lock and writes it into the header of the message (header.py). The
worker takes the lock of that key when the message is delivered (delivery.py). Beside the lock there
can be three other entries: of a queued call (unique.py), of the numbers of calls that replace each
other (latest.py), and of the end of a delivery (ended.py).

Where a request has the header
------------------------------

Celery makes the headers of a message attributes of the request. ``request.headers`` are the same
headers, but only if the message has no header of the name "headers". Sentry and ddtrace add one:

    message: singletask={…}  headers={"trace-id": …}     request.singletask  request.headers: traces
    apply(), and a message of protocol 1:                request.headers["singletask"]

So the attribute is read first. What a tool has copied into the inner headers can be older: it lacks
the token of the worker's main process.

Redelivery: a message and the lock of its own earlier run
---------------------------------------------------------

The same task id can meet its own lock. A retry or a replacement is published by the body, so it can
arrive before the body has ended. A redelivery can arrive while the first run is still running. To
skip such a message would lose the work, and to raise would fail the task.

    first run: takes the lock ........... result stored? not yet  -> releases -> result SUCCESS
    message:             again: postponed     postponed       free: one more hop -> SUCCESS: drop

The lock is released before the result is stored, hence one more hop after the release, unless the
result is there already. If the first run was killed, there is no result, and the message runs: at
least once.

A redelivery can also arrive after its first run, if the broker died before the acknowledgement, or
if the message waited in a worker for longer than the visibility timeout. The broker marks it. It
looks at the result before it takes the lock. If it then has the lock, its first run may have ended
just before, so it hops once and looks again:

    first run: takes the lock ... releases                        result SUCCESS
    message:            marked: no result   takes the lock: hops                 SUCCESS -> drop

A message that waited for so long is delivered to several workers, and the delivery without the mark
may be the last to run. Its worker knows since when it has waited. It does not hop, since all others
do; the last section says how they know of each other.

A caller may use the same id each day, and yesterday's result must not drop today's message. So the
message carries the time of its sending, by the clock of its sender. A result counts only if it is
newer, by the clock of the host that stored it:

    yesterday: message  result SUCCESS        today: message (redelivered)   older -> runs

Clocks that NTP sets differ by far less than a second. If it is not certain which is newer, a
message that is only marked runs. One that has met its first run is dropped. An id may be sent again
only after its earlier call has ended, because a result does not show to which of two calls it
belongs.

Kept locks: a run that has ended, and whose lock has not (lock_at_least)
------------------------------------------------------------------------

A limit counts attempts, so a body that began keeps its lock however it ends. Its record says
whether the body returned. If it did not, its work is not done, and the lock is for its own messages
as one of a first run that is alive: a retry, a replacement and a rejected message wait for the rest
of the time, and are neither skipped nor dropped because of their own earlier try:

    first try: begins   raises: kept ............................... ends
    retry:                         again: waits        waits              takes the lock, runs

A redelivery after a body that returned asks for the result, as above. It may find none, because the
process was killed before it stored one. Then the record shows that the work is done.

Tickets: of identical queued calls, the last runs (on_duplicate="replace")
--------------------------------------------------------------------------

An entry next to the lock counts the calls. Each call takes the next number when it is sent,
publishes its message with that number, and then notes the number in the entry. A delivery ends if a
higher number is noted. A noted number has a message in the queue, so no work is lost. A call that
others wait for, or whose body has begun, has a number, but no later call replaces it.

    producer A: takes 1, publishes A, notes 1
    producer B:                          takes 2, publishes B, notes 2
    worker:                                                          A: 2 is noted -> ends   B runs

If B's producer is killed before it notes 2, A is the highest: no harm, and B notes 2 when it is
delivered. Noting 1 after 2 changes nothing. In another order the last call can be lost:

    producer B: notes 2, killed                A: 2 is noted -> ends             no call is left

The number must be taken before publishing; otherwise the older of two simultaneous calls could win.
If the cache loses the entry, a new epoch begins: a number that is noted in it belongs to a later
call than every message of the old epoch.

With unique_for, the calls are in series that end in time (latest.py). The last call of a series
must run even if the workers are busy at the end. So its number is remembered, and a call of the
next series does not replace it by being published. In a steady stream, one is published before each
run, and none would ever run:

    producer: last of S1   first of S2 .... last of S2   first of S3
    worker:                          last of S1: ends               last of S2: ends

It replaces it by being received, which the worker notes. So no older arguments run after newer
ones, and behind a long run one call waits:

    run:        has the lock ......................................................... ends
    last of S1:     received, hops                       S2 was received -> ends
    last of S2:                          received, hops                     hops         runs

A call that was received is due. So a call of an earlier series gives way to one that runs now or
waits for the lock, and not to one of the future.

Notes: a delivery has ended, but its result is not stored yet
-------------------------------------------------------------

The result of a run is stored after its lock is free. So a delivery that has the lock, and finds no
result, cannot know whether another delivery of its message has just ended. It hops for about a
second, and looks again. Of several deliveries that hop, one runs, and another one can take the lock
before the result of the first is stored. So the first one notes its end:

    B: hops, takes the lock, runs      notes its end, releases             result SUCCESS
    C: hops                                                     takes: the note -> hops -> SUCCESS

Only a message that may be delivered several times has notes, so the others pay nothing.

A dead process stores nothing any more. The main process notes the death before it frees the lock,
and one delivery uses that note up, and does not hop:

    child:    body    SIGKILL
    main:                    notes the death, frees the lock, returns the message to the broker
    message:                                                    takes: the note -> runs at once

The death may be noted while another delivery runs: it has met the dead process itself and freed the
lock, or the process died before it had the lock. Then the end of the body replaces that note.
"""
