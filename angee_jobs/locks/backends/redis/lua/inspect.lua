-- The live hold of a name.
--
-- KEYS  the hold
-- Returns the time in microseconds and the hold, or 0 if there is none.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local hold = redis.call('GET', KEYS[1])
if not hold then
    return 0
end
local expires = tonumber(string.sub(hold, 1, 16))
if not expires then
    return redis.error_reply('ERR not a hold: ' .. KEYS[1])
end
if expires <= now then
    return 0
end
return {string.format('%.0f', now), hold}
