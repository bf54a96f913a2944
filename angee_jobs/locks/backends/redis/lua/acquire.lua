-- Take a lock that is free.
--
-- KEYS  the hold, the index, the token counter, the tombstone of this owner
-- ARGV  name, owner, ttl in microseconds, holder
-- Returns the head of the hold (expires, token, acquired: 16 digits each), or 0 if refused.
--
-- A hold is one string: that head, the owner in 64 characters, the holder. It has no TTL, so that no eviction
-- policy for keys with one can drop it; this script decides whether it has expired.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local hold = redis.call('GET', KEYS[1])
if hold then
    local expires = #hold >= 112 and tonumber(string.sub(hold, 1, 16))
    if not expires then
        return redis.error_reply('ERR not a hold: ' .. KEYS[1])
    end
    if expires > now then
        if string.sub(hold, 49, 112) == ARGV[2] then
            return string.sub(hold, 1, 48) -- asked again, because the first answer got lost
        end
        return 0
    end
end
if redis.call('EXISTS', KEYS[4]) == 1 then
    return 0 -- this request was given up, and comes late
end

local token = next_token(KEYS[3], now)
if not token then
    return redis.error_reply('ERR not a fencing token: ' .. KEYS[3])
end
local expires = now + ARGV[3]
local head = string.format('%016.0f%016.0f%016.0f', expires, token, now)
-- With pcall: the index only makes lists fast. A renewal adds what is missing in it.
redis.pcall('ZADD', KEYS[2], string.format('%.0f', expires), ARGV[1])
redis.call('MSET', KEYS[3], string.format('%.0f', token), KEYS[1], head .. ARGV[2] .. ARGV[4])
return head
