-- End the live hold of a name, of any owner, and wake those who wait for it.
--
-- KEYS  the hold, the index
-- ARGV  name, channel, the fencing token that it must have (16 digits; empty: any)
-- Returns the time in microseconds and the hold that was ended, or 0 if there was none, or 1 if it has members.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local hold = redis.call('GET', KEYS[1])
local expires = hold and tonumber(string.sub(hold, 1, 16))
if expires and expires > now and string.sub(hold, 49, 50) == '--' then
    return 1
end
if not expires or expires <= now or (ARGV[3] ~= '' and string.sub(hold, 17, 32) ~= ARGV[3]) then
    return 0
end
redis.call('DEL', KEYS[1])
redis.pcall('ZREM', KEYS[2], ARGV[1])
redis.pcall('PUBLISH', ARGV[2], '')
return {string.format('%.0f', now), hold}
