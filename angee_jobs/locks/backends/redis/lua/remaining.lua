-- How long the lock of a name is held for at least, unless it is released.
--
-- KEYS  the hold
-- Returns microseconds, 0 if the lock may be free.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local hold = redis.call('GET', KEYS[1])
local expires = hold and tonumber(string.sub(hold, 1, 16)) or now
return math.max(0, math.ceil(expires - now))
