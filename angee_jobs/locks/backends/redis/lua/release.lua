-- End the hold of its owner, and wake those who wait for it.
--
-- KEYS  the hold, the index, the tombstone of this owner
-- ARGV  name, owner, channel, life of the tombstone in milliseconds (0 for none)
-- Returns 1, or 0 if the hold had ended before.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

if ARGV[4] ~= '0' then
    -- Tombstone: refuses a late acquire by this owner, whose request may still be on its way on a connection that was
    -- given up. With pcall, since full memory is no reason to fail.
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
-- With pcall: the lock is free, whatever is wrong with the index, and also where an ACL forbids to publish.
redis.pcall('ZREM', KEYS[2], ARGV[1])
redis.pcall('PUBLISH', ARGV[3], '')
return 1
