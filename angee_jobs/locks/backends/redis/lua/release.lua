-- End the hold of its owner, and wake who waits for it.
--
-- KEYS  the hold, the index, the tombstone of this owner
-- ARGV  name, owner, channel, life of the tombstone in milliseconds (0 for none)
-- Returns 1, or 0 if the hold had ended before.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

if ARGV[4] ~= '0' then
    -- The request to acquire was not answered, and may still be on its way on a connection that was given up. From
    -- now on it comes too late. With pcall, since full memory is no reason to fail.
    redis.pcall('SET', KEYS[3], '', 'PX', ARGV[4])
end

local hold = redis.call('GET', KEYS[1])
if not hold or string.sub(hold, 49, 112) ~= ARGV[2] then
    return 0
end
local expires = tonumber(string.sub(hold, 1, 16))
if not expires or expires <= now then
    return 0
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.pcall('PUBLISH', ARGV[3], '') -- an ACL may forbid it; the lock is free all the same
return 1
