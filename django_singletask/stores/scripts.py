"""The scripts that a Redis or Valkey server runs, one for each kind of request."""

from __future__ import annotations

# The server runs nothing else during a script, so nothing happens between its read and its change:
#
#   holder A: GET -> mine            (its lease ends here, B takes the lock)
#   holder A: DEL                    frees B's lock: impossible inside a script
#
# A process takes a lock only in the epoch that it knows. SET NX would take the lock in any epoch.
# The client reads a text for each entry in half the time of an array.
TAKE = """
if ARGV[3] ~= '' and redis.call('GET', KEYS[1]) ~= ARGV[3] then return {} end
local entries, free, own = {}, false, false
for i = 2, #KEYS do
    local value = redis.call('GET', KEYS[i])
    if value == ARGV[1] then
        redis.call('PEXPIRE', KEYS[i], ARGV[2])
        return i - 2
    end
    if value then
        entries[#entries + 1] = i - 2 .. ' ' .. redis.call('PTTL', KEYS[i]) .. ' ' .. value
        own = own or (ARGV[5] or '') ~= '' and string.find(value, ARGV[5], 1, true)
    elseif i <= (ARGV[4] or 1) + 1 then
        free = free or i
    end
end
if own or not free then return entries end
redis.call('SET', KEYS[free], ARGV[1], 'PX', ARGV[2])
return free - 2
"""
CHANGE = """
local old, lease, new = ARGV[1], ARGV[2], ARGV[3] or ARGV[1]
local value = redis.call('GET', KEYS[1])
if value ~= old and value ~= new then return value and -1 or 0 end
if lease then
    redis.call('SET', KEYS[1], new, 'PX', lease)
else
    redis.call('DEL', KEYS[1])
end
return 1
"""
READ = """
local entries = {}
for i, key in ipairs(KEYS) do
    local value = redis.call('GET', key)
    entries[i] = value and {value, redis.call('PTTL', key)}
end
return entries
"""
# The client reads long lists of short replies faster than one short list for each entry. For a key
# that is not a string, MGET returns no value, and GET would raise.
LIST = """
local page = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local keys, left = page[2], {}
for i, key in ipairs(keys) do left[i] = redis.call('PTTL', key) end
local values = #keys > 0 and redis.call('MGET', unpack(keys)) or {}
return {page[1], keys, values, table.concat(left, ' ')}
"""
# Lua's numbers are exact only up to 2**53, and it prints 14 digits. So the server increases the
# counter and returns it as text. The counter has no expiry, so "volatile" policies do not evict it.
FENCE_SCRIPT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return false end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if redis.call('INCR', KEYS[2]) < now then
    redis.call('SET', KEYS[2], string.format('%.0f', now))
end
return redis.call('GET', KEYS[2])
"""
